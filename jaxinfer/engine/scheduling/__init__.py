"""Scheduling of what runs next, and what its results mean: sequences, queues, pages, plans. No jax."""
