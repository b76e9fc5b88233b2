"""Benchmarks among the sections of `jaxinfer check-gpu`, which a checkout has; see docs/gpu.md."""
