"""Buffers of the host, and what may be in them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_ALIGNMENT = 64  # bytes: a buffer that begins so becomes an array of a CPU without a copy
_CHECKED_AT_ONCE = 1 << 20


def new_buffer(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised array that jax takes as it is where the device is a CPU."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return np.ndarray(shape, dtype, buffer=memory.data, offset=begin)


def all_finite(part: np.ndarray) -> bool:
    """Whether no value is NaN or infinite. Checks chunks, so that the intermediate booleans stay small."""
    pieces = max(1, math.ceil(part.size / _CHECKED_AT_ONCE))
    return all(bool(np.isfinite(piece).all()) for piece in np.array_split(np.atleast_1d(part), pieces))
