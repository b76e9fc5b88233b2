"""Saving parameters as a standard Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from jaxinfer.types import ParamSpec, ParamTree, Source, walk_specs
from jaxinfer.weights.safetensors.checkpoint import SINGLE_FILE
from jaxinfer.weights.safetensors.writer import CODES, header_bytes
from jaxinfer.weights.tree import Path, as_stored, check_spec, dtype_of, leaf_of, target_dtype


def save_params(
    folder: str | pathlib.Path,
    params: Mapping[str, Any],
    specs: ParamTree,
    config_json: Mapping[str, Any],
    dtype: str | None = None,
) -> None:
    """Write config.json and model.safetensors in the checkpoint's names and shapes: the inverse of loading.

    Parameters are brought to the host one at a time. The file appears under its name only when it is complete.

    Args:
        folder: created if it does not exist; the two files in it are replaced.
        params: a nested dict of the form of ``specs``.
        specs: specs of the parameters; a tensor that is the source of two parameters must be equal in both.
        config_json: written as config.json, with the weights' dtype if they all share one.
        dtype: "float32", "bfloat16" or "float16", except for parameters with a fixed dtype; None keeps each dtype.

    Raises:
        ValueError: a parameter is missing or has another shape than its spec, or one tensor would get two values.
        OSError: the folder cannot be written.
    """
    folder = pathlib.Path(folder)
    leaves = [_leaf(params, path, spec, dtype) for path, spec in walk_specs(specs)]
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{SINGLE_FILE}.tmp"
    with unfinished.open("w+b") as file:
        _write_tensors(file, leaves)
    os.replace(unfinished, folder / SINGLE_FILE)
    config = json.dumps(_with_dtype(config_json, leaves), indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A parameter to write. ``value`` may be on a device; it is fetched when it is written."""

    spec: ParamSpec
    value: Any
    dtype: np.dtype[Any]


def _leaf(params: Mapping[str, Any], path: Path, spec: ParamSpec, dtype: str | None) -> _Leaf:
    check_spec(path, spec)
    value = leaf_of(params, path, spec)
    return _Leaf(spec, value, dtype_of(spec, target_dtype(dtype)) if dtype else np.dtype(value.dtype))


def _write_tensors(file: BinaryIO, leaves: Sequence[_Leaf]) -> None:
    header, offsets, size = _layout(leaves)
    file.write(header)
    file.truncate(len(header) + size)
    file.flush()
    written: set[Any] = set()
    for leaf in leaves:
        value = np.asarray(leaf.value)
        for source in leaf.spec.sources:
            offset = len(header) + offsets[source.name]
            _write(file, offset, leaf.dtype, source, value[source.where], (source.name, source.part) in written)
            written.add((source.name, source.part))


def _write(file: BinaryIO, offset: int, dtype: np.dtype[Any], source: Source, value: np.ndarray, written: bool) -> None:
    """Write a source's value into its tensor, which begins at ``offset``; if already written, compare it."""
    if not value.size:
        return
    tensor: Any = np.memmap(file, dtype, "r+", offset, source.shape or (1,))
    stored = as_stored(value, source).astype(dtype)
    if not written:
        tensor[source.part or ...] = stored
    elif tensor[source.part or ...].tobytes() != stored.tobytes():
        raise ValueError(f"two parameters that share the tensor {source.name!r} differ")


def _layout(leaves: Sequence[_Leaf]) -> tuple[bytes, dict[str, int], int]:
    """Return the header (`header_bytes`), the offset of each tensor, and the data size in bytes.

    Wide dtypes come first, so that every tensor is aligned to its element size.
    """
    kinds = {source.name: (source, leaf.dtype) for leaf in leaves for source in leaf.spec.sources}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, (source, dtype) in sorted(kinds.items(), key=lambda item: (-item[1][1].itemsize, item[0])):
        offsets[name], end = end, end + math.prod(source.shape) * dtype.itemsize
        entry = {"dtype": CODES[dtype], "shape": list(source.shape), "data_offsets": [offsets[name], end]}
        header[name] = entry
    return header_bytes(header), offsets, end


def _with_dtype(config_json: Mapping[str, Any], leaves: Sequence[_Leaf]) -> dict[str, Any]:
    names = {leaf.dtype.name for leaf in leaves if leaf.spec.dtype is None}
    if len(names) != 1:
        return dict(config_json)
    return {**config_json, "dtype" if "dtype" in config_json else "torch_dtype": names.pop()}
