"""What a GPU does with jaxinfer, measured in one command: ``python -m tools.gpu_check``. See docs/gpu.md."""
