"""LoRA adapters (Hu et al. 2021): reading, host cache, device slots, and merging into weights."""
