"""Measure what a GPU does with jaxinfer, in one command: ``python -m tools.gpu_check``. See docs/gpu.md."""
