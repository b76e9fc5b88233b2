"""Scheduling of steps and processing of their results: sequences, queues, pages, plans. No jax."""
