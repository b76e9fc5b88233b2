"""Unpacking of small integers from words, as packed by several tools, to arrays with one value per element."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxinfer.weights.buffers import copy_blocks

_UNITS = {3: 3, 5: 5, 6: 3, 7: 7}  # bytes that hold whole fields of these bits; other widths divide a byte
_ROWS = 128  # rows unpacked at a time


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack the fields of little-endian words ``[..., words]``, lowest bits first: uint8 ``[..., fields]``.

    The words of the last axis are one bit stream: fields of 3, 5, 6 or 7 bits may straddle two words.
    """
    stream = np.array(words, order="C").view(np.uint8)
    if bits == 8:
        return stream
    size = _UNITS.get(bits, 1)
    units, each = stream if size == 1 else _of_bytes(stream, size), 8 * size // bits
    result = np.empty((*units.shape, each), np.uint8)
    for index in range(each):
        np.right_shift(units, bits * index, out=result[..., index], casting="unsafe")
    np.bitwise_and(result, (1 << bits) - 1, out=result)
    return result.reshape(*words.shape[:-1], -1)


def by_rows(words: np.ndarray, bits: int, count: int, order: np.ndarray | None = None) -> np.ndarray:
    """Unpack the first ``count`` fields of each row, permuted by ``order`` if given: uint8 ``[rows, count]``.

    Works on a few rows at a time, so temporaries stay small compared with the result.
    """
    result = np.empty((words.shape[0], count), np.uint8)
    for row in range(0, words.shape[0], _ROWS):
        some = fields(words[row : row + _ROWS], bits)[:, :count]
        result[row : row + _ROWS] = some if order is None else np.take(some, order, axis=1)
    return result


def signed(values: np.ndarray, bits: int) -> np.ndarray:
    """Shift unsigned values down by half of their range, in place: int4 for up to 4 bits, else int8."""
    values -= 1 << (bits - 1)  # wraps around: the low bits are those of the signed number
    if bits > 4:
        return values.view(np.int8)
    return np.bitwise_and(values, 0x0F, out=values).view(ml_dtypes.int4)


def lowered(values: np.ndarray, bits: int) -> np.ndarray:
    """Shift unsigned zero points down by half of the codes' range: int8."""
    return (values.astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


def nibbles(stored: np.ndarray, high_first: bool = False) -> np.ndarray:
    """Unpack two 4-bit codes per byte: uint4 ``[..., 2 * bytes]``."""
    result = np.empty((*stored.shape, 2), np.uint8)
    np.bitwise_and(stored, 0x0F, out=result[..., int(high_first)])
    np.right_shift(stored, 4, out=result[..., int(not high_first)])
    return result.reshape(*stored.shape[:-1], -1).view(ml_dtypes.uint4)


def transposed(matrix: np.ndarray) -> np.ndarray:
    """Return a transposed copy."""
    result = np.empty(matrix.shape[::-1], matrix.dtype)
    copy_blocks(result, matrix.T)
    return result


def _of_bytes(stream: np.ndarray, size: int) -> np.ndarray:
    """Combine ``size`` bytes each into words; the last is zero-padded."""
    missing = -stream.shape[-1] % size
    whole = np.concatenate([stream, np.zeros((*stream.shape[:-1], missing), np.uint8)], axis=-1)
    parts = whole.reshape(*whole.shape[:-1], -1, size)
    result = np.zeros(parts.shape[:-1], np.uint32 if size <= 4 else np.uint64)
    for index in range(size):
        result |= parts[..., index].astype(result.dtype) << 8 * index
    return result
