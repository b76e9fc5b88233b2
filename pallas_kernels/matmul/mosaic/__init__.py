"""The Mosaic GPU kernel of matmul, for Hopper GPUs."""
