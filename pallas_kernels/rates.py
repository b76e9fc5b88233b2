"""The rates of GPUs for which heuristics choose tiles: one table, by JAX's name of the device."""

from __future__ import annotations

from typing import NamedTuple

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


class Rates(NamedTuple):
    """What one multiprocessor reads, in bytes a cycle.

    Attributes:
        memory: its share of the memory's rate, where all read.
        own: what it gets of the memory where others read less; no more than the L2 cache gives.
        cache: its share of the L2 cache's rate. By a model of measured times it is 27; published figures are 24 to 30.
    """

    memory: float
    own: float
    cache: float


# An H100's memory has 3.35 TB/s by its data sheet, an H200's 4.8, for 132 multiprocessors at 1.7 to 1.98 GHz; copies
# reach nine tenths of that. Measured on neither.
RATES = {H100: Rates(15, 20, 27), H200: Rates(20, 27, 27)}


def rates_of(device_kind: str | None) -> Rates:
    """The rates of a Hopper GPU: an H100's, where the table has none."""
    return RATES.get(device_kind or H100, RATES[H100])
