"""Output folders of quantised weights: safetensors files, or an Orbax checkpoint for each layer.

Both are written under a temporary name, layer by layer, and renamed when they are complete; see `unfinished`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxinfer.opening import write_companions
from jaxinfer.quantize.layer import gathered, places_of
from jaxinfer.quantize.work import Work, layer_name
from jaxinfer.types import walk_specs
from jaxinfer.weights.memory import InMemoryCheckpoint, as_loaded
from jaxinfer.weights.native.layouts import describe
from jaxinfer.weights.native.leaves import leaves_of
from jaxinfer.weights.native.writer import Unfinished, complete_folder
from jaxinfer.weights.safetensors.checkpoint import INDEX_FILE
from jaxinfer.weights.safetensors.reader import SafetensorsFile
from jaxinfer.weights.safetensors.writer import write_tensors
from jaxinfer.weights.tree import dtype_of, target_dtype


@runtime_checkable
class Target(Protocol):
    """Protocol of a folder of quantised weights that is being written."""

    def has(self, index: int) -> bool:
        """Return whether a layer is complete, possibly from an earlier run."""
        ...

    def write(self, index: int, made: Mapping[str, np.ndarray]) -> None:
        """Write a layer: its tensors by name, in the recipe's format."""
        ...

    def finish(self) -> None:
        """Write the files and tensors outside of the layers, and rename the folder to its final name.

        Raises:
            CheckpointError: the final name was created meanwhile.
        """
        ...


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """A folder with config.json, a safetensors file for each layer, one for all other tensors, and their index."""

    work: Work
    started: Unfinished

    def has(self, index: int) -> bool:
        return (self.started.folder / self._shard(index)).exists()

    def write(self, index: int, made: Mapping[str, np.ndarray]) -> None:
        write_tensors(self.started.folder / self._shard(index), made)
        self.started.keep(self._shard(index))

    def finish(self) -> None:
        work, folder = self.work, self.started.folder
        rest: dict[str, np.ndarray] = {}
        for path, spec in walk_specs(work.rest):
            dtype = dtype_of(spec, target_dtype(work.dtype))
            values = {path: np.asarray(work.value(path)).astype(np.float32)}
            for name, places in places_of({path: spec}).items():
                rest[name] = gathered(values, places).astype(dtype)
        write_tensors(folder / self._shard(work.layers), rest | work.tower)
        write_companions(work.files.path, folder)
        self._write_index()
        text = json.dumps(work.config_json, indent=2, ensure_ascii=False)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        self.started.publish()

    def _shard(self, index: int) -> str:
        """Return the file of a layer; the index after the last layer is the file of all other tensors."""
        return f"model-{index + 1:05}-of-{self.work.layers + 1:05}.safetensors"

    def _write_index(self) -> None:
        folder, names = self.started.folder, [self._shard(index) for index in range(self.work.layers + 1)]
        shards = {name: SafetensorsFile(folder / name).tensors for name in names}
        index = {
            "metadata": {"total_size": sum(info.nbytes for shard in shards.values() for info in shard.values())},
            "weight_map": {name: file for file, shard in shards.items() for name in shard},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Converted:
    """A converted folder: a layer's tensors are loaded in memory, and the loaded arrays are written."""

    work: Work
    started: Unfinished

    def has(self, index: int) -> bool:
        return any(name.partition("/")[0] == layer_name(index) for name in self.started.arrays)

    def write(self, index: int, made: Mapping[str, np.ndarray]) -> None:
        specs, name = self.work.specs, layer_name(index)
        config = self.work.config_json if self.work.taken(index) else {}
        stored, params = as_loaded(
            InMemoryCheckpoint(self.started.folder, made), {name: specs[name]}, config, self.work.dtype
        )
        self.started.describe(describe(stored))
        self.started.write(leaves_of(stored, params))

    def finish(self) -> None:
        work = self.work
        self.started.write(leaves_of(work.rest, work.model.params))
        write_companions(work.files.path, self.started.folder)
        complete_folder(self.started, work.config_json, work.dtype, self.started.storages)


TARGETS: Mapping[str, Any] = MappingProxyType({"orbax": Converted, "safetensors": HuggingFace})
