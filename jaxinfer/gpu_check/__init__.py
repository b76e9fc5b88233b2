"""Checks of jaxinfer on the local GPU: ``python -m jaxinfer.gpu_check``. See docs/gpu.md."""
