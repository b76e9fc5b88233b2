"""The rates of GPUs for which heuristics choose tiles: one table, by JAX's name of the device."""

from __future__ import annotations

from typing import NamedTuple

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


class Rates(NamedTuple):
    """Read rates of one multiprocessor, in bytes per cycle.

    Attributes:
        memory: its share of the memory bandwidth when all multiprocessors read.
        own: its memory bandwidth when others read less; no more than the L2 cache gives.
        cache: its share of the L2 bandwidth. A model of measured times gives 27; published figures are 24 to 30.
    """

    memory: float
    own: float
    cache: float


# By data sheet an H100's memory has 3.35 TB/s, an H200's 4.8, for 132 multiprocessors at 1.7 to 1.98 GHz; copies reach
# nine tenths of that. Measured on neither.
RATES = {H100: Rates(15, 20, 27), H200: Rates(20, 27, 27)}


def rates_of(device_kind: str | None) -> Rates:
    """Return the rates of a Hopper GPU; those of an H100 if the table has no entry."""
    return RATES.get(device_kind or H100, RATES[H100])
