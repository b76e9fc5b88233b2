"""Host memory: aligned buffers, copies in blocks, a chunked check for finite values, and mapped files."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np

_ALIGNMENT = 64  # bytes; the CPU backend uses a buffer with this alignment without a copy
_CHECKED_AT_ONCE = 1 << 20
_BLOCK = 128  # rows and columns of a block of a transposing copy; two blocks fit in the L2 cache


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


def copy_blocks(part: np.ndarray, tensor: np.ndarray) -> None:
    """Copy a tensor into a buffer; a transposed tensor in blocks, which is two to three times as fast."""
    if tensor.ndim < 2 or tensor.flags.c_contiguous:
        part[...] = tensor
        return
    columns = max(1, _BLOCK // max(1, math.prod(tensor.shape[2:])))
    for row in range(0, tensor.shape[0], _BLOCK):
        for column in range(0, tensor.shape[1], columns):
            block = (slice(row, row + _BLOCK), slice(column, column + columns))
            part[block] = tensor[block]


class MappedFile:
    """A memory-mapped file of tensors.

    Attributes:
        tensors: the tensors by name, each with its ``start`` and ``nbytes`` in the file.
    """

    tensors: Mapping[str, Any]
    _map: mmap.mmap

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as a read-only view of the file, without a copy; ``name`` must be one of ``tensors``."""
        raise NotImplementedError

    def expect(self, name: str, part: np.ndarray) -> None:
        """Advise the operating system to prefetch a view of the array that `read` returned, unless scattered."""
        begin = np.lib.array_utils.byte_bounds(self.read(name))[0]
        low, high = np.lib.array_utils.byte_bounds(part)
        if high - low <= part.nbytes:
            self._advise("MADV_WILLNEED", self.tensors[name].start + low - begin, high - low)

    def release(self, name: str) -> None:
        """Let the operating system reclaim the pages of a tensor; views of it stay valid."""
        self._advise("MADV_DONTNEED", self.tensors[name].start, self.tensors[name].nbytes)

    def _advise(self, advice: str, start: int, nbytes: int) -> None:
        if not hasattr(mmap, advice) or nbytes == 0:
            return
        begin = start - start % mmap.PAGESIZE
        # only a hint: file systems that do not support it still read correctly
        with contextlib.suppress(OSError):
            self._map.madvise(getattr(mmap, advice), begin, start + nbytes - begin)
