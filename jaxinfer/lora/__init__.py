"""Low-rank adapters (Hu et al. 2021): read, kept, and placed on the device. What crosses processes runs without jax."""
