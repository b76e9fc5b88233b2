"""Low-rank adapters (Hu et al. 2021): read, kept, and placed on the device. Runs without jax."""
