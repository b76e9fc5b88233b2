"""Manifest of a converted folder: its arrays, their chunks, and a checksum of each chunk.

A converted folder is ``config.json``, the tokenizer's files, ``params/`` and ``jaxinfer_manifest.json``, which is
written last. ``params/`` has one Orbax checkpoint for each top-level name of the parameter tree, with a Zarr version 3
array for each parameter, and a file for each chunk: the values, little-endian and in C order, followed by their CRC-32C
(Zarr's codec ``crc32c``, https://zarr-specs.readthedocs.io/en/latest/v3/codecs/crc32c/) for other readers. The manifest
has a CRC-32 (that of gzip, RFC 1952) of each chunk's values. The manifest has no paths: an array's path follows from
its name in the model, so no manifest can point outside of the folder.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.safetensors.checkpoint import read_json_object
from jaxinfer.weights.tree import Path

MANIFEST = "jaxinfer_manifest.json"
UNFINISHED = "jaxinfer_unfinished.jsonl"
PARAMS = "params"
FORMAT, VERSION = "jaxinfer checkpoint", 1

# Supported array dtypes. TensorStore's Zarr driver lacks the last two, which are packed two to a byte (`StoredArray`).
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        np.dtype(kind).name: np.dtype(kind)
        for kind in (
            np.bool_,
            *(np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32),
            *(np.float16, np.float32, ml_dtypes.bfloat16),
            *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
            *(ml_dtypes.int4, ml_dtypes.uint4),
        )
    }
)
NIBBLES = ("int4", "uint4")
FLOATS = ("float32", "bfloat16", "float16")

_ZARR_CHECKSUM = 4  # bytes
_MAX_DIMENSIONS = 16
_MAX_SIZE = 2**40
_MAX_CHUNKS = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}", re.ASCII)
_CHECKSUM = re.compile(r"[0-9a-f]{8}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array as stored in a converted folder.

    4-bit values are stored as bytes: two neighbours along the last dimension per byte, the first in the low nibble; if
    that dimension is odd, one value per byte.

    Attributes:
        dtype: a name in `DTYPES`.
        chunk: the shape of its chunks, which divides `stored_shape`.
        checksums: checksum of each chunk, in C order, see `checksum`.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    checksums: tuple[str, ...] = ()

    @property
    def paired(self) -> bool:
        """Whether two values share a byte."""
        return self.dtype in NIBBLES and bool(self.shape) and self.shape[-1] % 2 == 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.shape[-1] // 2) if self.paired else self.shape

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8) if self.dtype in NIBBLES else DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.stored_shape) * self.stored_dtype.itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dimension."""
        return tuple(size // part for size, part in zip(self.stored_shape, self.chunk, strict=True))

    @property
    def value_bytes(self) -> int:
        """Size of a chunk's values in bytes."""
        return math.prod(self.chunk) * self.stored_dtype.itemsize

    @property
    def file_bytes(self) -> int:
        """Size of a chunk's file in bytes."""
        return self.value_bytes + _ZARR_CHECKSUM

    def chunks(self) -> Iterator[str]:
        """Yield the chunk files relative to the array's folder, in the order of the checksums."""
        return (chunk_file(place) for place in itertools.product(*map(range, self.grid)))

    def zarr(self) -> dict[str, Any]:
        """Return the contents of the array's ``zarr.json``; the reader uses these and ignores the file."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.stored_shape),
            "data_type": self.stored_dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": False if self.dtype == "bool" else 0,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        }


def checksum(values: bytes | memoryview) -> str:
    """Return the CRC-32 of a chunk in hexadecimal."""
    return f"{zlib.crc32(values):08x}"


def chunk_file(place: tuple[int, ...]) -> str:
    """Return the file of the chunk at a grid index (Zarr's default chunk keys)."""
    return "/".join(["c", *map(str, place)])


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of the manifest.

    Attributes:
        architecture: name of the architecture in config.json.
        dtype: dtype of the model.
        arrays: the arrays by name, see `array_name`.
        storages: layouts of the quantised weights; see `jaxinfer.weights.native.layouts`.
    """

    architecture: str
    dtype: str
    arrays: Mapping[str, StoredArray]
    storages: Mapping[str, Any] = MappingProxyType({})

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def array_name(path: Path) -> str:
    """Return the array name of the parameter at a path.

    Raises:
        ValueError: a key is not a valid file name.
    """
    if not path or not all(_NAME.fullmatch(key) for key in path):
        raise ValueError(f"a parameter named {'/'.join(path)!r} cannot be stored: only A-Z, a-z, 0-9, _ and - may be")
    return "/".join(path)


def array_folder(name: str) -> str:
    """Return the folder of an array in a converted folder: Orbax's naming, below the parameter's top-level name."""
    part, _, rest = name.partition("/")
    return f"{PARAMS}/{part}/{leaf_key(rest)}"


def leaf_key(rest: str) -> str:
    """Return the folder of an array in its Orbax checkpoint; "value" if the checkpoint is a single array."""
    return rest.replace("/", ".") or "value"


def is_converted(folder: pathlib.Path) -> bool:
    """Return whether `jaxinfer.convert` wrote this folder.

    Raises:
        CheckpointError: the conversion was interrupted.
    """
    if (folder / MANIFEST).exists():
        return True
    if (folder / UNFINISHED).exists():
        raise CheckpointError(f"{folder} is an unfinished conversion: run jaxinfer convert again")
    return False


# ---- as JSON


def write_manifest(folder: pathlib.Path, manifest: Manifest, made_by: Mapping[str, str]) -> None:
    """Write the manifest. ``made_by``: versions, for information only."""
    plain = {
        "format": FORMAT,
        "version": VERSION,
        "made_by": dict(made_by),
        "architecture": manifest.architecture,
        "dtype": manifest.dtype,
        "bytes": manifest.nbytes,
        "storages": dict(manifest.storages),
        "arrays": {name: array_to_json(array) for name, array in manifest.arrays.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(plain) + "\n", encoding="utf-8")


def read_manifest(folder: pathlib.Path) -> Manifest:
    """Read the manifest of a folder, and check that every file it implies exists and has the right size.

    Raises:
        CheckpointError: the manifest is invalid, or a file is missing or has another size.
    """
    path = folder / MANIFEST
    plain = read_json_object(path)
    if plain.get("format") != FORMAT or plain.get("version") != VERSION:
        raise CheckpointError(f"{path} is not of the form that this version reads ({FORMAT}, version {VERSION})")
    architecture, dtype = plain.get("architecture"), plain.get("dtype")
    arrays, storages = plain.get("arrays"), plain.get("storages")
    if not isinstance(architecture, str) or not isinstance(dtype, str) or not isinstance(arrays, dict) or not arrays:
        raise CheckpointError(f"{path} does not name an architecture, a dtype and arrays")
    if not isinstance(storages, dict):
        raise CheckpointError(f"{path} does not say which weights are quantised")
    if dtype not in FLOATS:
        raise CheckpointError(f"{path} names the dtype {quoted(dtype)}, which no model has")
    manifest = Manifest(architecture, dtype, {name: _array(path, name, one) for name, one in arrays.items()}, storages)
    if plain.get("bytes") != manifest.nbytes:
        raise CheckpointError(f"{path} says {quoted(str(plain.get('bytes')))} bytes, its arrays are {manifest.nbytes}")
    for name, array in manifest.arrays.items():
        check_files(folder, name, array)
    return manifest


def array_to_json(array: StoredArray) -> dict[str, Any]:
    """Encode an array's description for `array_from_json`."""
    return {"shape": array.shape, "dtype": array.dtype, "chunk": array.chunk, "crc32": array.checksums}


def array_from_json(plain: Any) -> StoredArray | None:
    """Decode an array of a manifest; None if it is invalid."""
    if not isinstance(plain, dict) or not isinstance(plain.get("dtype"), str) or plain["dtype"] not in DTYPES:
        return None
    shape, chunk, checksums = plain.get("shape"), plain.get("chunk"), plain.get("crc32")
    if not _is_shape(shape) or not _is_shape(chunk) or len(shape) != len(chunk):
        return None
    array = StoredArray(tuple(shape), plain["dtype"], tuple(chunk))
    if any(size % part for size, part in zip(array.stored_shape, chunk, strict=True)) or math.prod(shape) > _MAX_SIZE:
        return None
    if math.prod(array.grid) > _MAX_CHUNKS or not isinstance(checksums, list):
        return None
    if len(checksums) != math.prod(array.grid):
        return None
    if not all(isinstance(one, str) and _CHECKSUM.fullmatch(one) for one in checksums):
        return None
    return dataclasses.replace(array, checksums=tuple(checksums))


def _array(path: pathlib.Path, name: str, plain: Any) -> StoredArray:
    array = array_from_json(plain) if all(_NAME.fullmatch(key) for key in name.split("/")) else None
    if array is None:
        raise CheckpointError(f"{path} describes the array {quoted(name)} in a form that cannot be")
    return array


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return False
    return all(type(size) is int and 0 < size <= _MAX_SIZE for size in value)


def check_files(folder: pathlib.Path, name: str, array: StoredArray) -> None:
    """Raise CheckpointError if a chunk's file is missing or has another size."""
    below = f"{folder}/{array_folder(name)}"
    for file in array.chunks():
        found = _size(f"{below}/{file}")
        if found != array.file_bytes:
            state = "is missing" if found is None else f"has {found} bytes and should have {array.file_bytes}"
            raise CheckpointError(f"{below}/{file} {state}: is the copy complete?")


def _size(path: str) -> int | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
