"""Checks of the kernels that need no GPU: operands for comparisons, and compilation to machine code."""
