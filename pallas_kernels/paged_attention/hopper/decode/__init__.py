"""Paged decode attention for Hopper GPUs, in Pallas Mosaic GPU."""
