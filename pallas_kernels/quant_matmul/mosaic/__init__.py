"""The Mosaic GPU kernel of quant_matmul, for Hopper GPUs."""
