"""Estimates before loading: whether an engine fits into the memory of its devices. No jax."""
