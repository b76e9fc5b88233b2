"""few_rows: products of up to 64 rows on a CPU, bitwise independent of the number of rows."""

from pallas_kernels.few_rows.api import dot, most_rows, refusal
from pallas_kernels.few_rows.native import TARGET, has_amx, supports_float16, unavailable

__all__ = ["TARGET", "dot", "has_amx", "most_rows", "refusal", "supports_float16", "unavailable"]
