"""quant_matmul: a matrix product with 4-bit or 8-bit weights that are never dequantised in memory."""

from pallas_kernels.quant_matmul.api import explain, explain_tiles, matmul, matmul_tiles
from pallas_kernels.quant_matmul.reference import Packed, dequantized, pack, placed

__all__ = ["Packed", "dequantized", "explain", "explain_tiles", "matmul", "matmul_tiles", "pack", "placed"]
