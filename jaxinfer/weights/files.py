"""Files of a model: its config, its tensors, and the layouts of its weights, whatever the format."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.types import ParamTree
from jaxinfer.weights.formats import quantized_weights
from jaxinfer.weights.native.reader import ConvertedCheckpoint
from jaxinfer.weights.quantized import StoredCheckpoint, StoredWeight, storages
from jaxinfer.weights.safetensors.checkpoint import Tensors, open_checkpoint, read_json_object
from jaxinfer.weights.tree import with_names

_NOTHING: Mapping[str, StoredWeight] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """A model's folder.

    Attributes:
        path: the folder.
        config_json: what its config.json says.
    """

    path: pathlib.Path
    config_json: Mapping[str, Any]

    @functools.cached_property
    def tensors(self) -> Tensors:
        """All tensors of the checkpoint, opened when they are first asked for.

        Raises:
            CheckpointError: see `open_checkpoint`.
        """
        return open_checkpoint(self.path)

    @property
    def state(self) -> dict[str, list[int]]:
        """Size in bytes and time in nanoseconds of each file of the folder, by name, to see that one was changed."""
        folder = self.path.parent if self.path.is_file() else self.path
        found = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
        return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}

    @functools.cached_property
    def _stored(self) -> tuple[Mapping[str, StoredWeight], frozenset[str]]:
        """The weights that are stored quantised, and the tensors that they are made of."""
        if not self.quantized:
            return _NOTHING, frozenset()
        weights, consumed = quantized_weights(self.tensors, self.config_json)
        return weights, frozenset(consumed)

    @property
    def quantized(self) -> bool:
        """Whether the checkpoint says that it holds quantised weights."""
        return bool(self.config_json.get("quantization_config") or self.config_json.get("compression_config"))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, as they are stored."""
        return sum(info.nbytes for info in self.tensors.tensors.values())

    def named(self, specs: ParamTree, prefix: str) -> ParamTree:
        """The parameters, with the names that this checkpoint gives to its tensors (see `Family.prefix`)."""
        names = (*self.tensors.tensors, *self._stored[0])
        if any(name.startswith(prefix) for name in names):
            return specs
        return with_names(specs, lambda name: name.removeprefix(prefix))

    def stored(self, specs: ParamTree, dtype: str) -> ParamTree:
        """The parameters (`named`) with storages for those weights that are stored quantised.

        Args:
            dtype: see `storages`.

        Raises:
            CheckpointError: see `quantized_weights` and `storages`.
        """
        return storages(specs, self._stored[0], dtype) if self.quantized else specs

    def checkpoint(self, specs: ParamTree) -> Tensors | ConvertedCheckpoint:
        """Source of the parameters of `stored`."""
        return StoredCheckpoint(self.tensors, *self._stored, specs) if self.quantized else self.tensors


def open_files(path: pathlib.Path) -> ModelFiles:
    """Reads config.json; weights are opened when they are asked for.

    Raises:
        CheckpointError: see `read_json_object`.
    """
    return ModelFiles(path, read_json_object(path / "config.json"))
