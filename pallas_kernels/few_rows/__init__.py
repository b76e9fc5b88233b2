"""few_rows: products of up to eight rows on a CPU, bitwise independent of the number of rows."""

from pallas_kernels.few_rows.api import MOST_ROWS, dot, refusal
from pallas_kernels.few_rows.native import TARGET, supports_float16, unavailable

__all__ = ["MOST_ROWS", "TARGET", "dot", "refusal", "supports_float16", "unavailable"]
