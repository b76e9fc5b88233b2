"""A model folder as one set of named tensors, for a single file or many shards."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxinfer.weights.errors import CheckpointError, listed, quoted
from jaxinfer.weights.safetensors.reader import SafetensorsFile, TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_JSON_BYTES = 100_000_000
_FOREIGN = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.npz")


@runtime_checkable
class Tensors(Protocol):
    """Protocol of a tensor source for `load_params`: a `Checkpoint`, a GGUF file, or either with stored weights.

    Attributes:
        folder: the path, for messages.
        tensors: the tensors by name.
    """

    @property
    def folder(self) -> pathlib.Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray:
        """Return a tensor, read-only or in a new buffer."""
        ...

    def expect(self, name: str, part: np.ndarray) -> None:
        """Prefetch data, see `Checkpoint.expect`."""
        ...

    def release(self, name: str) -> None:
        """Release memory, see `Checkpoint.release`."""
        ...


class Checkpoint:
    """The tensors of a folder.

    Args:
        files: the file that holds each tensor, by the tensor's name.
        unlisted: names of tensors that the index does not list.
    """

    def __init__(
        self, folder: pathlib.Path, files: Mapping[str, SafetensorsFile], unlisted: Set[str] = frozenset()
    ) -> None:
        self.folder = folder
        self._files = files
        infos = {name: file.tensors[name] for name, file in files.items()}
        infos |= {name: dataclasses.replace(infos[name], listed=False) for name in unlisted}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(infos)

    def joined(self, other: Checkpoint) -> Checkpoint:
        """Return the tensors of both folders. Raises `CheckpointError` if both have one of the same name."""
        if both := self.tensors.keys() & other.tensors.keys():
            raise CheckpointError(f"{quoted(min(both))} is in {self.folder} and in {other.folder}")
        unlisted = {name for each in (self, other) for name, info in each.tensors.items() if not info.listed}
        return Checkpoint(self.folder, {**self._files, **other._files}, unlisted)

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as a read-only view of its file."""
        return self._files[name].read(name)

    def expect(self, name: str, part: np.ndarray) -> None:
        """Prefetch a slice of a tensor, a view of the array that `read` returned, into memory."""
        self._files[name].expect(name, part)

    def release(self, name: str) -> None:
        """Release the mapped pages of a tensor that was read."""
        self._files[name].release(name)


def open_checkpoint(folder: pathlib.Path, *parts: pathlib.Path) -> Checkpoint:
    """Open a folder and check all its headers; reads no tensor.

    Uses ``model.safetensors``, else the shards of ``model.safetensors.index.json``, else the only safetensors file.

    Args:
        parts: folders with the tensors that it lacks.

    Raises:
        CheckpointError: there are no such files, or one is missing or damaged; or two folders have the same tensor.
    """
    found = _opened(folder)
    for part in parts:
        found = found.joined(_opened(part))
    return found


def _opened(folder: pathlib.Path) -> Checkpoint:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not (folder / SINGLE_FILE).exists() and (folder / INDEX_FILE).exists():
        listed_in = _weight_map(folder / INDEX_FILE)
        shards = _open_shards(folder, listed_in)
        return Checkpoint(folder, shards, shards.keys() - listed_in.keys())
    file = SafetensorsFile(_only_file(folder))
    return Checkpoint(folder, dict.fromkeys(file.tensors, file))


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Raises:
        CheckpointError: it does not exist, cannot be read, is larger than 100 MB, or is not a JSON object.
    """
    try:
        value = json.loads(_read_bounded(path).decode("utf-8"))
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _read_bounded(path: pathlib.Path) -> bytes:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file")
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_JSON_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _only_file(folder: pathlib.Path) -> pathlib.Path:
    if (folder / SINGLE_FILE).exists():
        return folder / SINGLE_FILE
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = listed([path.name for path in found])
        raise CheckpointError(f"{folder} holds {len(found)} safetensors files ({names}) but no {INDEX_FILE}")
    foreign = sorted({path.name for pattern in _FOREIGN for path in folder.glob(pattern)})
    if foreign:
        raise CheckpointError(
            f"{folder} holds {listed(foreign)} but no safetensors file: convert it, for example by loading it with "
            f"transformers and calling save_pretrained, and pass the new folder"
        )
    raise CheckpointError(f"{folder} holds no weights: expected {SINGLE_FILE} or {INDEX_FILE} with its shards")


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    """Map tensor names to shards. A shard must be a bare file name, so an index cannot point outside its folder."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise CheckpointError(f"{index} sends tensor {quoted(name)} to {quoted(str(shard))}, not a shard's name")
    return weight_map


def _is_plain_name(shard: str) -> bool:
    return shard.endswith(".safetensors") and not set(shard) & set("/\\:\0") and not shard.startswith(".")


def _open_shards(folder: pathlib.Path, weight_map: Mapping[str, str]) -> dict[str, SafetensorsFile]:
    """Map all tensors of the shards to their shard, even if the index lists another one, as transformers does."""
    shards = {name: SafetensorsFile(folder / name) for name in sorted(set(weight_map.values()))}
    found = {name: file for file in shards.values() for name in file.tensors}
    return found | {name: shards[shard] for name, shard in weight_map.items() if name in shards[shard].tensors}
