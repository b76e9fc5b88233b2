"""Model files: config.json, tensors and weight layouts, independent of the checkpoint format."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.formats.multimodal import (
    OTHER_TENSORS,
    OTHERS,
    component,
    is_wrapper,
    spelling,
    spellings,
    text_model,
)
from jaxinfer.types import ParamTree, walk_specs
from jaxinfer.weights.formats import mlx, quant_method, quantized_weights
from jaxinfer.weights.formats.beside import PLACES, with_quantization
from jaxinfer.weights.formats.fields import CONFIG_FILE
from jaxinfer.weights.moe_stacks import with_experts
from jaxinfer.weights.native.reader import ConvertedCheckpoint
from jaxinfer.weights.quantized import StoredCheckpoint, StoredWeight, storages
from jaxinfer.weights.safetensors.checkpoint import Tensors, open_checkpoint, read_json_object
from jaxinfer.weights.tree import with_names

_NOTHING: Mapping[str, StoredWeight] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """A model folder.

    Attributes:
        path: the folder.
        config_json: contents of config.json; of a wrapped model, those of the text model alone.
        wrapped: whether the model is inside a wrapper model (`jaxinfer.formats.multimodal`).
        renamed: tensor names to read instead, by the names they replace.
        quantized_by: the file that describes the weight quantisation.
        whole_json: contents of config.json as they are; of a wrapped model, those of the wrapper.
        parts: folders with the tensors that this one lacks.
    """

    path: pathlib.Path
    config_json: Mapping[str, Any]
    wrapped: bool = dataclasses.field(default=False, kw_only=True)
    renamed: Mapping[str, str] = dataclasses.field(default=MappingProxyType({}), kw_only=True)
    quantized_by: str = dataclasses.field(default=CONFIG_FILE, kw_only=True)
    whole_json: Mapping[str, Any] = dataclasses.field(default=MappingProxyType({}), kw_only=True)
    parts: tuple[pathlib.Path, ...] = dataclasses.field(default=(), kw_only=True)

    @functools.cached_property
    def tensors(self) -> Tensors:
        """All tensors of the checkpoint, opened on first access.

        Raises:
            CheckpointError: see `open_checkpoint`.
        """
        return open_checkpoint(self.path, *self.parts)

    @property
    def state(self) -> dict[str, list[int]]:
        """Size in bytes and mtime in nanoseconds of each file of the folder, by name; used to detect changes."""
        folder = self.path.parent if self.path.is_file() else self.path
        found = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
        return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}

    @functools.cached_property
    def _stored(self) -> tuple[Mapping[str, StoredWeight], frozenset[str]]:
        """The quantised weights by name, and the names of the tensors they are stored in."""
        if not self._described:
            return _NOTHING, frozenset()
        weights, consumed = quantized_weights(self.tensors, self.config_json, self.quantized_by)
        return weights, frozenset(consumed)

    @property
    def _described(self) -> bool:
        return any(self.config_json.get(name) for name in PLACES)

    @property
    def quantized(self) -> bool:
        """Whether the checkpoint has quantised weights, as config.json declares or as its tensors show."""
        return self._described and (self.quantized_by == CONFIG_FILE or bool(self._stored[0]))

    @property
    def quant_method(self) -> str:
        """Name of the method by which weights are quantised; "": config.json names none."""
        return quant_method(self.config_json, self.quantized_by)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(info.nbytes for info in self.tensors.tensors.values())

    @property
    def shows_ties(self) -> bool:
        """Whether the folder has tensors that show if embeddings are tied (a plan needs only config.json)."""
        return any(self.path.glob("*.safetensors"))

    def named(self, specs: ParamTree, prefix: str) -> ParamTree:
        """Return the specs with this checkpoint's tensors: its names (`spelled`), and its stacks of experts."""
        return with_experts(self.spelled(specs, prefix), self.shapes)

    def spelled(self, specs: ParamTree, prefix: str) -> ParamTree:
        """Return the specs with this checkpoint's tensor names (see `Family.prefix`)."""
        wanted = {source.name for _, spec in walk_specs(specs) for source in spec.sources}
        spell = spelling(self.shapes, wanted, prefix, self.wrapped)
        return with_names(specs, lambda name: self.renamed.get(spell(name), spell(name)))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors and stored weights, by name."""
        shapes = {name: info.shape for name, info in self.tensors.tensors.items()}
        return shapes | {name: weight.shape for name, weight in self._stored[0].items()}

    def pieces(self, name: str, rows: int) -> Iterator[np.ndarray]:
        """Yield the values of a tensor, ``rows`` at a time, or the parts of a stored weight."""
        if (weight := self._stored[0].get(name)) is not None:
            yield from (weight.read(part) for part in (*weight.parts, *weight.input_parts))
            return
        whole = self.tensors.read(name)
        yield from (whole[start : start + rows] for start in range(0, len(whole), rows))
        self.tensors.release(name)

    def replace(self, **changes: Any) -> ModelFiles:
        """Return a copy with other fields that shares the files already opened."""
        changed = dataclasses.replace(self, **changes)
        changed.__dict__.update({name: vars(self)[name] for name in ("tensors", "_stored") if name in vars(self)})
        return changed

    def ignored(self, patterns: Iterable[str], prefix: str) -> tuple[str, ...]:
        """Return patterns of tensors to ignore: those given, in every spelling, and the tensors of the wrapper."""
        spelled = {spell(pattern): None for pattern in patterns for spell in spellings(prefix, self.wrapped)}
        return (*spelled, *(OTHER_TENSORS if self.wrapped else ()))

    @property
    def left_out(self) -> dict[str, int]:
        """Number of tensors of the wrapper around the model (`outside`), by the first component of their names."""
        return dict(Counter(map(component, self.outside)))

    @property
    def outside(self) -> list[str]:
        """Names of the tensors of the wrapper around the text model."""
        return [name for name in self.tensors.tensors if component(name) in OTHERS] if self.wrapped else []

    def stored(self, specs: ParamTree, dtype: str) -> ParamTree:
        """Return the specs (`named`) with quantised storages for the weights that are stored quantised.

        Args:
            dtype: see `storages`.

        Raises:
            CheckpointError: see `quantized_weights` and `storages`.
        """
        return storages(specs, self._stored[0], dtype) if self.quantized else specs

    def checkpoint(self, specs: ParamTree) -> Tensors | ConvertedCheckpoint:
        """Return the tensor source for the specs that `stored` returned."""
        return StoredCheckpoint(self.tensors, *self._stored, specs) if self.quantized else self.tensors


def open_files(path: pathlib.Path) -> ModelFiles:
    """Read config.json; the weights are opened on first access.

    Raises:
        CheckpointError: see `read_json_object`.
    """
    config = mlx.described(read_json_object(path / CONFIG_FILE))
    config, file = with_quantization(config, path)
    return ModelFiles(path, text_model(config), wrapped=is_wrapper(config), quantized_by=file, whole_json=config)
