"""Reader of untrusted GGUF files: metadata, and the position of each tensor.

A file is a magic, a version, two counts, key-value pairs, one entry for each tensor, and the data, which is aligned
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Everything is little-endian. All sizes that a file declares
are checked against its length before anything is allocated; arrays stay in the file until they are read.

This module depends neither on models nor on jax: the front end reads its tokenizer with it, the engine its weights.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import pathlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 1 << 24
MAX_STRINGS = 1 << 23  # over all arrays: the largest vocabularies have 262,144 tokens and twice as many merges
MAX_ALIGNMENT = 1 << 20
MAX_DIMENSIONS = 4
_MAX_EXTENT = 1 << 62
_SHOWN = 120  # characters of a name in a message

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, struct.Struct] = MappingProxyType(
    {
        0: struct.Struct("<B"),
        1: struct.Struct("<b"),
        2: struct.Struct("<H"),
        3: struct.Struct("<h"),
        4: struct.Struct("<I"),
        5: struct.Struct("<i"),
        6: struct.Struct("<f"),
        7: struct.Struct("<B"),
        10: struct.Struct("<Q"),
        11: struct.Struct("<q"),
        12: struct.Struct("<d"),
    }
)
_BOOL = 7
_LENGTH = struct.Struct("<Q")
_UINT32 = struct.Struct("<I")

# By ggml type number. Unquantized types have their safetensors names.
PLAIN: Mapping[int, str] = MappingProxyType(
    {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
)
BLOCKS: Mapping[int, str] = MappingProxyType(
    {
        2: "Q4_0",
        3: "Q4_1",
        6: "Q5_0",
        7: "Q5_1",
        8: "Q8_0",
        10: "Q2_K",
        11: "Q3_K",
        12: "Q4_K",
        13: "Q5_K",
        14: "Q6_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        29: "IQ1_M",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
        40: "NVFP4",
        41: "Q1_0",
        42: "Q2_0",
    }
)
_INTERMEDIATE = "which llama.cpp makes of a product's inputs while it runs: of as many bits, files have Q8_0"
_REPACKED = "which llama.cpp reads from files no more: quantise the model again as {}, of which it is another order"
_FIRST = "which llama.cpp removed in 2023: quantise the model again as a known type"
_UNKNOWN = "which a fork of llama.cpp has, or a later one: quantise the model again as a known type"
# Other ggml type numbers, current or removed, and why tensors of these types are rejected.
_REFUSED: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        4: ("Q4_2", _FIRST),
        5: ("Q4_3", _FIRST),
        9: ("Q8_1", _INTERMEDIATE),
        15: ("Q8_K", _INTERMEDIATE),
        31: ("Q4_0_4_4", _REPACKED.format("Q4_0")),
        32: ("Q4_0_4_8", _REPACKED.format("Q4_0")),
        33: ("Q4_0_8_8", _REPACKED.format("Q4_0")),
        36: ("IQ4_NL_4_4", _REPACKED.format("IQ4_NL")),
        37: ("IQ4_NL_4_8", _REPACKED.format("IQ4_NL")),
        38: ("IQ4_NL_8_8", _REPACKED.format("IQ4_NL")),
    }
)
# Numbers and bytes per block; an unquantized number is a block of 1.
SIZES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "F32": (1, 4),
        "F16": (1, 2),
        "BF16": (1, 2),
        "F64": (1, 8),
        "I8": (1, 1),
        "I16": (1, 2),
        "I32": (1, 4),
        "I64": (1, 8),
        "Q1_0": (128, 18),
        "Q2_0": (64, 18),
        "Q4_0": (32, 18),
        "Q4_1": (32, 20),
        "Q5_0": (32, 22),
        "Q5_1": (32, 24),
        "Q8_0": (32, 34),
        "Q2_K": (256, 84),
        "Q3_K": (256, 110),
        "Q4_K": (256, 144),
        "Q5_K": (256, 176),
        "Q6_K": (256, 210),
        "IQ1_S": (256, 50),
        "IQ1_M": (256, 56),
        "IQ2_XXS": (256, 66),
        "IQ2_XS": (256, 74),
        "IQ2_S": (256, 82),
        "IQ3_XXS": (256, 98),
        "IQ3_S": (256, 110),
        "IQ4_NL": (32, 18),
        "IQ4_XS": (256, 136),
        "MXFP4": (32, 17),
        "NVFP4": (64, 36),
        "TQ1_0": (256, 54),
        "TQ2_0": (256, 66),
    }
)


class GgufError(ValueError):
    """A file that cannot be read. The message is one sentence for the user."""


class _FormatError(ValueError):
    """An error in a file, without its name."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A checked tensor: ``shape`` is [out, in] as elsewhere, the reverse of ggml's; ``start`` is the offset from the
    beginning of the file. ``kind`` is a key of `SIZES`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array that was skipped but not read."""

    kind: int
    count: int
    start: int


class Metadata(Mapping[str, Any]):
    """Key-value pairs of a file. Arrays are read again at each access, as lists.

    Raises:
        GgufError: (at an access) an array is too long, or one of its strings is too long or not UTF-8.
    """

    def __init__(self, path: pathlib.Path, data: mmap.mmap, entries: Mapping[str, Scalar | _Array]) -> None:
        self.path = path
        self._data = data
        self._entries = entries

    def __getitem__(self, key: str) -> Value:
        entry = self._entries[key]
        if not isinstance(entry, _Array):
            return entry
        try:
            return _read_array(self._data, entry, f"the value of {quoted(key)}")
        except _FormatError as error:
            raise GgufError(f"{self.path} is not a valid GGUF file: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def count(self, key: str) -> int | None:
        """Return the number of elements of an array, without reading it; None if there is no such array."""
        entry = self._entries.get(key)
        return entry.count if isinstance(entry, _Array) else None


class Header:
    """Header of a memory-mapped GGUF file, fully checked.

    The mapping lives as long as the object or any array made of it. The file must not shrink meanwhile.

    Attributes:
        path: path of the file.
        data: the whole mapping.
        metadata: its key-value pairs.
        tensors: its tensors by ggml name.

    Raises:
        GgufError: the file is missing, truncated, inconsistent or exceeds the limits of this module.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.data = _mapped(path)
        try:
            entries, tensors = _parse(_Cursor(self.data))
        except _FormatError as error:
            raise GgufError(f"{path} is not a valid GGUF file: {error}") from None
        self.metadata = Metadata(path, self.data, entries)
        self.tensors: Mapping[str, GgufTensor] = MappingProxyType(tensors)


def quoted(name: str) -> str:
    """Return a name from an untrusted file in a form that is safe in a message."""
    return repr(name if len(name) <= _SHOWN else name[:_SHOWN] + "...")


def _mapped(path: pathlib.Path) -> mmap.mmap:
    # is_file first: opening a pipe would block forever
    if not path.is_file():
        raise GgufError(f"{path} does not exist or is not a file")
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise GgufError(f"{path} is not a valid GGUF file: it is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse(cursor: _Cursor) -> tuple[dict[str, Scalar | _Array], dict[str, GgufTensor]]:
    tensor_count, key_count = _counts(cursor)
    entries: dict[str, Scalar | _Array] = {}
    for _ in range(key_count):
        key = cursor.name("a key")
        if key in entries:
            raise _FormatError(f"it has the key {quoted(key)} twice")
        entries[key] = cursor.value(key)
    alignment = _alignment(entries.get("general.alignment", 32))
    tensors: dict[str, GgufTensor] = {}
    for _ in range(tensor_count):
        info = _tensor_entry(cursor)
        if info.name in tensors:
            raise _FormatError(f"it has two tensors of the name {quoted(info.name)}")
        tensors[info.name] = info
    start = cursor.at + -cursor.at % alignment
    _check_places(tensors.values(), start, alignment, len(cursor.data))
    return entries, {name: dataclasses.replace(info, start=start + info.start) for name, info in tensors.items()}


@dataclasses.dataclass
class _Cursor:
    """Read position of the parser, bounded by the end of the file."""

    data: mmap.mmap
    at: int = 0
    strings: int = 0

    def take(self, count: int, what: str) -> int:
        """Skip ``count`` bytes and return their start."""
        start = self.at
        if count > len(self.data) - start:
            raise _FormatError(f"it ends within {what}: is it truncated?")
        self.at = start + count
        return start

    def scalar(self, form: struct.Struct, what: str) -> int | float:
        value: int | float = form.unpack_from(self.data, self.take(form.size, what))[0]
        return value

    def uint32(self, what: str) -> int:
        return int(self.scalar(_UINT32, what))

    def uint64(self, what: str) -> int:
        return int(self.scalar(_LENGTH, what))

    def text(self, what: str, limit: int) -> str:
        length = self.uint64(what)
        if length > limit:
            raise _FormatError(f"{what} claims {length} bytes, more than the allowed {limit}")
        start = self.take(length, what)
        return _decoded(self.data[start : self.at], what)

    def name(self, what: str) -> str:
        return self.text(what, MAX_NAME_BYTES)

    def value(self, key: str) -> Scalar | _Array:
        what = f"the value of {quoted(key)}"
        kind = self.uint32(what)
        if kind == _STRING:
            return self.text(what, MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise _FormatError(f"{what} has the unknown type {kind}")
        value = self.scalar(_SCALARS[kind], what)
        return bool(value) if kind == _BOOL else value

    def _array(self, what: str) -> _Array:
        kind, count = self.uint32(what), self.uint64(what)
        if kind == _ARRAY:
            raise _FormatError(f"{what} is an array of arrays, which is not supported")
        if kind != _STRING and kind not in _SCALARS:
            raise _FormatError(f"{what} is an array of the unknown type {kind}")
        found = _Array(kind, count, self.at)
        if kind == _STRING:
            self._skip_strings(count, what)
        else:
            self.take(count * _SCALARS[kind].size, what)
        return found

    def _skip_strings(self, count: int, what: str) -> None:
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise _FormatError(f"{what} claims {count} strings: all arrays together may have {MAX_STRINGS}")
        # A string has at least 8 bytes: checking here bounds the loop below by the file size.
        if count * _LENGTH.size > len(self.data) - self.at:
            raise _FormatError(f"it ends within {what}: is it truncated?")
        at, end, unpack = self.at, len(self.data) - _LENGTH.size, _LENGTH.unpack_from
        for _ in range(count):
            if at > end:
                raise _FormatError(f"it ends within {what}: is it truncated?")
            at += _LENGTH.size + unpack(self.data, at)[0]
        self.at = at
        self.take(0, what)


def _decoded(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _FormatError(f"{what} is not UTF-8 text") from None


def _read_array(data: mmap.mmap, array: _Array, what: str) -> list[Scalar]:
    if array.count > MAX_STRINGS:
        raise _FormatError(f"{what} has {array.count} elements, more than the allowed {MAX_STRINGS}")
    if array.kind == _STRING:
        return list(_strings(data, array, what))
    form = _SCALARS[array.kind]
    raw = data[array.start : array.start + array.count * form.size]
    values = struct.unpack(f"<{array.count}{form.format[-1]}", raw)
    return [bool(value) for value in values] if array.kind == _BOOL else list(values)


def _strings(data: mmap.mmap, array: _Array, what: str) -> Iterator[str]:
    at = array.start
    for _ in range(array.count):
        length = _LENGTH.unpack_from(data, at)[0]
        if length > MAX_STRING_BYTES:
            raise _FormatError(f"{what} has a string of {length} bytes, more than the allowed {MAX_STRING_BYTES}")
        at += _LENGTH.size
        yield _decoded(data[at : at + length], what)
        at += length


def _counts(cursor: _Cursor) -> tuple[int, int]:
    start = cursor.take(len(MAGIC), "its first bytes")
    if cursor.data[start : cursor.at] != MAGIC:
        raise _FormatError("it does not begin with GGUF")
    version = cursor.uint32("its version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise _FormatError("it is big-endian" if swapped else f"its version {version} is not 2 or 3")
    tensors, keys = cursor.uint64("its count of tensors"), cursor.uint64("its count of keys")
    if tensors > MAX_TENSORS:
        raise _FormatError(f"it claims {tensors} tensors, more than the allowed {MAX_TENSORS}")
    if keys > MAX_KEYS:
        raise _FormatError(f"it claims {keys} keys, more than the allowed {MAX_KEYS}")
    return tensors, keys


def _alignment(value: object) -> int:
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        text = "an array" if isinstance(value, _Array) else quoted(str(value))
        raise _FormatError(f"general.alignment is {text}, not a power of two up to {MAX_ALIGNMENT}")
    return value


def _tensor_entry(cursor: _Cursor) -> GgufTensor:
    """Read a tensor's entry, whose ``start`` counts from the beginning of the data."""
    name = cursor.name("a tensor's name")
    what = f"tensor {quoted(name)}"
    dimensions = cursor.uint32(what)
    if not 0 < dimensions <= MAX_DIMENSIONS:
        raise _FormatError(f"{what} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
    shape = tuple(reversed([cursor.uint64(what) for _ in range(dimensions)]))
    kind, offset = _kind(cursor.uint32(what), what), cursor.uint64(what)
    if not all(shape) or math.prod(shape) > _MAX_EXTENT or offset > _MAX_EXTENT:
        raise _FormatError(f"{what} has a shape or an offset that no file could have")
    elements, size = SIZES[kind]
    if shape[-1] % elements:
        raise _FormatError(f"{what} has rows of {shape[-1]}, which are no whole blocks of {kind}")
    return GgufTensor(name, kind, shape, offset, math.prod(shape) // elements * size)


def _kind(number: int, what: str) -> str:
    kind = PLAIN.get(number) or BLOCKS.get(number)
    if kind is None:
        kind, why = _REFUSED.get(number, (f"the unknown type {number}", _UNKNOWN))
        known = ", ".join(sorted([*PLAIN.values(), *BLOCKS.values()]))
        raise _FormatError(f"{what} is stored as {kind}, {why} (known: {known})")
    return kind


def _check_places(infos: Iterable[GgufTensor], start: int, alignment: int, size: int) -> None:
    """Check that tensors are aligned, within the file, and do not overlap."""
    reached, previous = 0, ""
    for info in sorted(infos, key=lambda info: (info.start, info.nbytes)):
        what = f"tensor {quoted(info.name)}"
        if info.start % alignment:
            raise _FormatError(f"{what} does not begin at a multiple of {alignment}")
        if start + info.start + info.nbytes > size:
            end = start + info.start + info.nbytes
            raise _FormatError(f"{what} ends at byte {end} of a file of {size}: is it truncated?")
        if info.start < reached:
            raise _FormatError(f"{what} overlaps tensor {quoted(previous)}")
        reached, previous = info.start + info.nbytes, info.name
