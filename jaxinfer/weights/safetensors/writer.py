"""Writing safetensors files atomically: each appears under its name only when it is complete."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from jaxinfer.weights.safetensors.reader import DTYPES

CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGN = 8


def write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> int:
    """Write a safetensors file of these tensors, replacing an existing one; return the data size in bytes.

    Raises:
        KeyError: safetensors does not support a dtype.
        OSError: the file cannot be written.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # aligned to element size
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        code = CODES[tensors[name].dtype]
        header[name] = {"dtype": code, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb") as file:
        file.write(header_bytes(header))
        for name in names:
            file.write(np.ascontiguousarray(tensors[name]).tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return end


def header_bytes(header: Mapping[str, object]) -> bytes:
    """Return the beginning of a file: the header's length and its JSON, padded to the format's alignment."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text
