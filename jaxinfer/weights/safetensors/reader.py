"""Reader of untrusted safetensors files.

A file is 8 bytes of header length (little-endian), a JSON header that gives each tensor a dtype, a shape and a byte
range, and the data (https://github.com/huggingface/safetensors#format).

The safetensors library is not used because its numpy tensors are copies in addition to its own mapping, so that a
tensor takes twice its size, and because it accepts duplicate names in a header. Here a tensor is a read-only view of
the mapping, whose pages can be released once it was read. The tests compare with the library.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import mmap
import os
import pathlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.weights.buffers import MappedFile
from jaxinfer.weights.errors import CheckpointError, quoted

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "U16": np.dtype(np.uint16),
        "I16": np.dtype(np.int16),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "U32": np.dtype(np.uint32),
        "I32": np.dtype(np.int32),
        "F32": np.dtype(np.float32),
        "U64": np.dtype(np.uint64),
        "I64": np.dtype(np.int64),
        "F64": np.dtype(np.float64),
    }
)

MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
_MAX_DIMENSIONS = 32
_MAX_EXTENT = 2**62
_PREFIX = 8


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A checked entry of a header.

    Attributes:
        start: offset in bytes from the beginning of the file.
        listed: whether the folder's index lists it; unlisted tensors may be unused.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    listed: bool = True


class SafetensorsFile(MappedFile):
    """A memory-mapped safetensors file whose header is valid.

    The mapping lives as long as the object or any array read from it. The file must not shrink meanwhile: the operating
    system kills a process that touches a truncated page.

    Attributes:
        path: path of the file.
        tensors: the tensors by name.

    Raises:
        CheckpointError: the file is missing or truncated, or its header is invalid.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._map = _map_file(path)
        try:
            self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_read_header(self._map))
        except _HeaderError as error:
            raise CheckpointError(f"{path} is not a valid safetensors file: {error}") from None

    def read(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        return np.ndarray(info.shape, DTYPES[info.dtype], buffer=self._map, offset=info.start)


class _HeaderError(ValueError):
    """Error of a header, without the file's name."""


def _map_file(path: pathlib.Path) -> mmap.mmap:
    # is_file first: opening a pipe would block forever
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _PREFIX:
                raise CheckpointError(f"{path} is not a valid safetensors file: it is only {size} bytes long")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_header(data: mmap.mmap) -> dict[str, TensorInfo]:
    length = int.from_bytes(data[:_PREFIX], "little")
    if length > MAX_HEADER_BYTES:
        raise _HeaderError(f"its header claims {length} bytes, more than the allowed {MAX_HEADER_BYTES}")
    start = _PREFIX + length
    if start > len(data):
        raise _HeaderError(f"its header claims {length} bytes but the file ends after {len(data) - _PREFIX}")
    header = _parse_json(data[_PREFIX:start])
    header.pop("__metadata__", None)
    tensors = {name: _entry(name, value, start) for name, value in header.items()}
    _check_layout(tensors.values(), start, len(data))
    return tensors


def _parse_json(raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except _HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise _HeaderError(f"its header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise _HeaderError("its header is not a JSON object")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        (twice, _), *_ = collections.Counter(name for name, _ in pairs).most_common(1)
        raise _HeaderError(f"its header names {quoted(twice)} twice")
    return result


def _entry(name: str, value: object, data_start: int) -> TensorInfo:
    """Check one tensor's own values. Python integers do not overflow, so no product can wrap around."""
    label = f"tensor {quoted(name)}"
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise _HeaderError(f"{label} lacks a proper dtype, shape or data_offsets")
    if dtype not in DTYPES:
        raise _HeaderError(f"{label} has the unknown dtype {quoted(dtype)}")
    if len(shape) > _MAX_DIMENSIONS or not all(_is_count(size) for size in (*shape, begin, end)):
        raise _HeaderError(f"{label} has a shape or offsets that are not small lists of non-negative integers")
    itemsize = DTYPES[dtype].itemsize
    if math.prod(max(size, 1) for size in shape) * itemsize > _MAX_EXTENT:
        raise _HeaderError(f"{label} has a shape that no memory could hold")
    if math.prod(shape) * itemsize != end - begin:
        needed = math.prod(shape) * itemsize
        raise _HeaderError(f"{label} needs {needed} bytes for {dtype} {shape} but its offsets span {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, end - begin)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_EXTENT


def _check_layout(tensors: Iterable[TensorInfo], data_start: int, size: int) -> None:
    """Check that tensors cover the data exactly once: none past the end, no overlap, no gap, no trailing data."""
    reached, previous = data_start, ""
    for info in sorted(tensors, key=lambda info: (info.start, info.nbytes)):
        label = f"tensor {quoted(info.name)}"
        if info.start + info.nbytes > size:
            raise _HeaderError(f"{label} ends at byte {info.start + info.nbytes} of a file of {size}: is it truncated?")
        if info.start < reached:
            raise _HeaderError(f"{label} overlaps tensor {quoted(previous)}")
        if info.start > reached:
            raise _HeaderError(f"{info.start - reached} bytes before {label} belong to no tensor")
        reached, previous = info.start + info.nbytes, info.name
    if reached != size:
        raise _HeaderError(f"{size - reached} bytes at its end belong to no tensor")
