"""token_quant: per-token quantisation to 8 bits, in one launch."""

from pallas_kernels.token_quant.api import explain, quantize
from pallas_kernels.token_quant.reference import Rule

__all__ = ["Rule", "explain", "quantize"]
