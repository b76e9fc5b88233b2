"""Paged attention for Hopper GPUs, in Pallas Mosaic GPU."""
