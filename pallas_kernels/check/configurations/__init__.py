"""Shipped shapes of each op, compiled by `python -m pallas_kernels.check`."""
