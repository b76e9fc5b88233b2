"""Low-rank adapters (Hu et al. 2021): read, kept, placed on the device, folded into weights."""
