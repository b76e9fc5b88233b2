"""The shapes that ship of each op: what `python -m pallas_kernels.check` compiles."""
