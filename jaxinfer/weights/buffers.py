"""Host buffers: aligned allocation and a chunked check for finite values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_ALIGNMENT = 64  # bytes; the CPU backend uses a buffer with this alignment without a copy
_CHECKED_AT_ONCE = 1 << 20


def new_buffer(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an uninitialised array that JAX adopts without a copy if the device is a CPU."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return np.ndarray(shape, dtype, buffer=memory.data, offset=begin)


def all_finite(part: np.ndarray) -> bool:
    """Return whether no value is NaN or infinite. Checks in chunks to keep the intermediate boolean arrays small."""
    pieces = max(1, math.ceil(part.size / _CHECKED_AT_ONCE))
    return all(bool(np.isfinite(piece).all()) for piece in np.array_split(np.atleast_1d(part), pieces))
