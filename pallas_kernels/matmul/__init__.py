"""matmul: a batch-invariant dense product (rows are bitwise independent of their number), with a fused epilogue."""

from pallas_kernels.matmul.api import explain, matmul
from pallas_kernels.matmul.mosaic.launch import refusal, tiles_of
from pallas_kernels.matmul.types import Extras, Layout

__all__ = ["Extras", "Layout", "explain", "matmul", "refusal", "tiles_of"]
