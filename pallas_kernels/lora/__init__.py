"""lora: products of low rank of rows with the adapter that each row has."""

from pallas_kernels.lora.api import explain, group, low_rank

__all__ = ["explain", "group", "low_rank"]
