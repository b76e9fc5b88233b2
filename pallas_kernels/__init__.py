"""Pallas kernels for NVIDIA GPUs: each op has a reference equation, an XLA path and rejections in words."""
