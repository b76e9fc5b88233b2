"""Kernels in Pallas, for NVIDIA GPUs: each with its equation, a version in plain XLA, and refusals."""
