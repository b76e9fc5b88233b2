"""lora: low-rank products of rows with the adapter of each row."""

from pallas_kernels.lora.api import by_slot, explain, group, low_rank
from pallas_kernels.lora.cpu import BySlot

__all__ = ["BySlot", "by_slot", "explain", "group", "low_rank"]
