"""lora: products of low rank of rows with the adapter that each row has."""

from pallas_kernels.lora.api import by_slot, explain, group, low_rank
from pallas_kernels.lora.cpu import BySlot

__all__ = ["BySlot", "by_slot", "explain", "group", "low_rank"]
