"""GGUF files (llama.cpp) as checkpoints: a model's config.json, its unquantized tensors, and its quantised weights.

``docs/gguf.md`` lists the architectures and the block types.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.formats.gguf import GgufError, Metadata
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.gguf.architectures import architecture_of
from jaxinfer.weights.gguf.fused_tensors import Joined, Latest, joined
from jaxinfer.weights.gguf.header_view import Described
from jaxinfer.weights.gguf.tensor_names import Target
from jaxinfer.weights.gguf.tensors import GgufFile, Plain, stored_weight
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.reader import TensorInfo

MAX_FILES = 1000
MAX_NAMES = 1 << 20
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)


class GgufCheckpoint:
    """The tensors of a model under their Hugging Face names; see `Checkpoint`.

    Attributes:
        folder: the (first) file.
        config_json: the equivalent of config.json.
        metadata: key-value pairs of the file; `jaxinfer.text.gguf` reads those of the tokenizer.
        tensors: the unquantized tensors.
        weights: the block-quantised weights.
    """

    def __init__(self, files: list[GgufFile]) -> None:
        self.folder = files[0].path
        self.metadata: Metadata = files[0].metadata
        homes = _homes(files)
        self._model = Described(
            self.folder,
            self.metadata,
            {name: file.tensors[name].shape for name, file in homes.items()},
            lambda name: Plain(homes[name], name, Target(name)).read(),
        )
        architecture = architecture_of(self._model)
        self._names = architecture.names
        self.config_json: Mapping[str, Any] = MappingProxyType(
            {**architecture.config_json(self._model), "torch_dtype": _usual_dtype(homes)}
        )
        self._plain: dict[str, Plain | Joined] = {}
        weights: dict[str, StoredWeight] = {}
        for name, file in homes.items():
            self._sort(file, name, weights)
        self._join(homes, weights)
        self.weights: Mapping[str, StoredWeight] = MappingProxyType(weights)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: plain.info(name) for name, plain in self._plain.items()}
        )

    def read(self, name: str) -> np.ndarray:
        """Return an unquantized tensor: a read-only view of the file, or a new buffer if its form differs."""
        return self._plain[name].read()

    def expect(self, name: str, part: np.ndarray) -> None:
        """Prefetch a slice of a tensor, a view of the array that `read` returned, into memory."""
        self._plain[name].expect(part)

    def release(self, name: str) -> None:
        """Release the mapped pages of a tensor that was read."""
        self._plain[name].release()

    def _sort(self, file: GgufFile, name: str, weights: dict[str, StoredWeight]) -> None:
        for target in self._names.targets(self._model, name):
            if target.name in self._plain or target.name in weights:
                raise CheckpointError(f"{file.path} holds {quoted(target.name)} twice, as {quoted(name)} at last")
            if len(self._plain) + len(weights) >= MAX_NAMES:
                raise CheckpointError(f"{file.path} holds more than {MAX_NAMES} tensors")
            plain = Plain(file, name, target)
            if plain.in_blocks:
                weights[target.name] = stored_weight(plain)
            else:
                self._plain[target.name] = plain

    def _join(self, homes: Mapping[str, GgufFile], weights: dict[str, StoredWeight]) -> None:
        """Join tensors that the checkpoint has as one."""
        latest = Latest()
        for join in self._names.joined(self._model):
            made = joined(join, tuple(Plain(homes[part], part, Target(part)) for part in join.parts), latest)
            if not made.fits:
                raise CheckpointError(f"{self.folder} has tensors {', '.join(join.parts)} of shapes that do not fit")
            if made.in_blocks:
                weights[join.name] = made.stored()
            else:
                self._plain[join.name] = made


def open_gguf(path: pathlib.Path) -> GgufCheckpoint:
    """Open a GGUF file, or the first file of a split model, and check all headers.

    Raises:
        CheckpointError: a file is missing or damaged, the architecture is unknown, or the metadata lacks a required
            key.
    """
    try:
        return GgufCheckpoint(_files(path))
    except GgufError as error:  # of a metadata array, which is parsed only on access
        raise CheckpointError(str(error)) from error


def _files(path: pathlib.Path) -> list[GgufFile]:
    first = GgufFile(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_FILES:
        raise CheckpointError(f"{path} says that it is one of {quoted(str(count))} files")
    if count <= 1:
        return [first]
    found = _PART.fullmatch(path.name)
    if found is None or found[2] != "00001" or int(found[3]) != count:
        raise CheckpointError(
            f"{path} is one of {count} files: pass the first, whose name ends in -00001-of-{count:05d}.gguf"
        )
    rest = [path.with_name(f"{found[1]}-{index:05d}-of-{count:05d}.gguf") for index in range(2, count + 1)]
    return [first, *map(GgufFile, rest)]


def _homes(files: list[GgufFile]) -> dict[str, GgufFile]:
    homes: dict[str, GgufFile] = {}
    for file in files:
        for name in file.tensors:
            if name in homes:
                raise CheckpointError(f"{file.path} holds tensor {quoted(name)}, which {homes[name].path} holds, too")
            homes[name] = file
    return homes


def _usual_dtype(homes: Mapping[str, GgufFile]) -> str:
    """Return the dtype of the matrices if none is block-quantised; bfloat16 for a block-quantised model."""
    kinds = {file.tensors[name].kind for name, file in homes.items() if len(file.tensors[name].shape) > 1}
    if kinds <= {"F16"} and kinds:
        return "float16"
    return "float32" if kinds <= {"F32", "F64"} else "bfloat16"
