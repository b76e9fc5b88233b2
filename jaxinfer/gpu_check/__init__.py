"""Measure what a GPU does with jaxinfer, in one command: ``python -m jaxinfer.gpu_check``. See docs/gpu.md."""
