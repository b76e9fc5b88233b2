"""matmul: a dense product of which no bit of a row depends on the number of rows, with its epilogue in one launch."""

from pallas_kernels.matmul.api import explain, matmul
from pallas_kernels.matmul.mosaic.launch import refusal, tiles_of
from pallas_kernels.matmul.types import Extras, Layout

__all__ = ["Extras", "Layout", "explain", "matmul", "refusal", "tiles_of"]
