"""A Hugging Face folder as numpy arrays, with numpy alone. Runs on Python 3.11, in every peer's environment.

Only for folders that the user of a benchmark names: `jaxinfer.weights` reads untrusted files.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

BYTES = {"float32": 4, "bfloat16": 2}

_STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class Entry(NamedTuple):
    """Location of one tensor: ``begin`` and ``end`` are offsets in its file."""

    file: pathlib.Path
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def tensor_entries(folder: pathlib.Path) -> dict[str, Entry]:
    """Return every tensor of every safetensors file in the folder, by name."""
    entries: dict[str, Entry] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for name, item in header.items():
            begin, end = (8 + size + offset for offset in item["data_offsets"])
            entries[name] = Entry(file, item["dtype"], tuple(item["shape"]), begin, end)
    return entries


def read_tensors(folder: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and float32 values of each tensor, one at a time."""
    for name, entry in tensor_entries(folder).items():
        stored = np.fromfile(entry.file, _STORED[entry.kind], math.prod(entry.shape), offset=entry.begin)
        wide = from_bfloat16(stored) if entry.kind == "BF16" else stored.astype(np.float32)
        yield name, wide.reshape(entry.shape)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 given as uint16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the uint16 bits of the nearest bfloat16, ties to even, as torch and XLA round. For finite values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
