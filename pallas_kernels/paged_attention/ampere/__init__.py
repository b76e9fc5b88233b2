"""Paged attention for GPUs below Hopper, in Pallas Mosaic GPU."""
