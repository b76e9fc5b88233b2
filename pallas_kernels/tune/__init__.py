"""``python -m pallas_kernels.tune``: measures the Mosaic kernels' tiles on this machine's GPU, see `__main__`."""
