"""Tables of the 4-bit codebooks, and of bitsandbytes' 8-bit scales."""

from __future__ import annotations

import numpy as np


def _dynamic() -> np.ndarray:
    """Return bitsandbytes' signed 8-bit tree (Dettmers 2016): more leading zeros mean smaller and coarser values.

    For each sign, indicator i has 2^i equally spaced fractions between 0.1 and 1: their midpoints times 10^(i - 6).
    """
    values = [np.float32(0.0), np.float32(1.0)]
    for i in range(7):
        borders = _from_both_ends(2**i + 1)
        middles = (borders[:-1] + borders[1:]) / np.float32(2)
        scaled = np.float32(10.0 ** (i - 6)) * middles
        values += [*scaled, *(-scaled)]
    return np.sort(np.asarray(values, np.float32))


def _from_both_ends(count: int) -> np.ndarray:
    """Return values from 0.1 to 1, each computed from the nearer end in float32, like the tool's own table."""
    first, last = np.float32(0.1), np.float32(1.0)
    step = (last - first) / np.float32(count - 1)
    index = np.arange(count, dtype=np.float64)  # float64, so that product and sum are rounded once
    return np.where(index < count // 2, first + step * index, last - step * (count - 1 - index)).astype(np.float32)


# Dettmers et al. 2023, appendix E.
NF4 = np.asarray(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
# bitsandbytes' 4-bit floats: sign, then a nonstandard order, divided by the largest (12).
_FP4_SIZES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = np.asarray([*_FP4_SIZES, *(-size for size in _FP4_SIZES)], np.float32) / np.float32(12)
DYNAMIC = _dynamic()
