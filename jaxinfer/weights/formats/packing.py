"""Small integers that several tools pack into words, as arrays of one value an entry."""

from __future__ import annotations

import ml_dtypes
import numpy as np

_UNITS = {3: 3, 5: 5, 6: 3, 7: 7}  # bytes that hold whole fields of so many bits; others divide a byte
_ROWS = 128  # at a time: two blocks of a transposition stay in the second-level cache


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """The fields of little-endian words ``[..., words]``, lowest bits first: uint8 ``[..., fields]``.

    The words of the last axis are one stream of bits: fields of 3, 5, 6 or 7 bits may lie across two of them.
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
    """The first ``count`` fields of each row, in another ``order`` if there is one: uint8 ``[rows, count]``.

    A few rows at a time: beside the result nothing of its size is made.
    """
    result = np.empty((words.shape[0], count), np.uint8)
    for row in range(0, words.shape[0], _ROWS):
        some = fields(words[row : row + _ROWS], bits)[:, :count]
        result[row : row + _ROWS] = some if order is None else np.take(some, order, axis=1)
    return result


def signed(values: np.ndarray, bits: int) -> np.ndarray:
    """Values that count from 0, moved down by half of their range, in place: int4 for up to 4 bits, else int8."""
    values -= 1 << (bits - 1)  # wraps around: the lower bits are those of the signed number
    if bits > 4:
        return values.view(np.int8)
    return np.bitwise_and(values, 0x0F, out=values).view(ml_dtypes.int4)


def lowered(values: np.ndarray, bits: int) -> np.ndarray:
    """Zero points that count from 0, moved down by half of the codes' range: int8."""
    return (values.astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


def nibbles(stored: np.ndarray, high_first: bool = False) -> np.ndarray:
    """Two 4-bit codes a byte: uint4 ``[..., 2 * bytes]``."""
    result = np.empty((*stored.shape, 2), np.uint8)
    np.bitwise_and(stored, 0x0F, out=result[..., int(high_first)])
    np.right_shift(stored, 4, out=result[..., int(not high_first)])
    return result.reshape(*stored.shape[:-1], -1).view(ml_dtypes.uint4)


def transposed(matrix: np.ndarray) -> np.ndarray:
    """A copy with rows as columns, in blocks: two to three times as fast as in one."""
    result = np.empty(matrix.shape[::-1], matrix.dtype)
    for row in range(0, matrix.shape[0], _ROWS):
        for column in range(0, matrix.shape[1], _ROWS):
            part = matrix[row : row + _ROWS, column : column + _ROWS]
            result[column : column + _ROWS, row : row + _ROWS] = part.T
    return result


def _of_bytes(stream: np.ndarray, size: int) -> np.ndarray:
    """Words of ``size`` bytes each; the last is filled up with zeros."""
    missing = -stream.shape[-1] % size
    whole = np.concatenate([stream, np.zeros((*stream.shape[:-1], missing), np.uint8)], axis=-1)
    parts = whole.reshape(*whole.shape[:-1], -1, size)
    result = np.zeros(parts.shape[:-1], np.uint32 if size <= 4 else np.uint64)
    for index in range(size):
        result |= parts[..., index].astype(result.dtype) << 8 * index
    return result
