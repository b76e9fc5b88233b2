"""Quantisation of a model while it is loaded: its description, and its parameters, a layer at a time.

The numbers are those of `quantize`: a checkpoint that it writes holds the same parameters, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxinfer.models.model import Model
from jaxinfer.quant.layouts import Layout
from jaxinfer.quant.make import Made, MadeCodebook
from jaxinfer.quant.make.recipe import Recipe
from jaxinfer.quantize.calibration import Batch, Calibration, passed
from jaxinfer.quantize.layer import LayerWeights, Linear
from jaxinfer.quantize.layerwise import first_batches, quantized, quantized_weight, require_layers
from jaxinfer.quantize.work import Work, layer_name
from jaxinfer.types import ParamSpec, ParamTree, map_specs
from jaxinfer.weights.files import ModelFiles
from jaxinfer.weights.load import load_params
from jaxinfer.weights.quantized import StoredCheckpoint, StoredWeight, storages
from jaxinfer.weights.safetensors.reader import TensorInfo
from jaxinfer.weights.safetensors.writer import CODES
from jaxinfer.weights.tree import Path, Place

_log = logging.getLogger("jaxinfer")


def described(files: ModelFiles, model: Model, recipe: Recipe) -> Model:
    """Return a model, described without weights, as it will be when it is quantised.

    Raises:
        RecipeError: the recipe does not apply to it.
    """
    work = Work(files, model, recipe, None)
    require_layers(work)
    work.require_taken()
    stored = {
        name: StoredWeight(linear.shape, _layout(recipe, linear.shape, work.dtype), _unread, 0)
        for index in range(work.layers)
        for name, linear in work.taken(index).items()
    }
    quantised = model.with_specs(storages(work.specs, stored, work.dtype), work.dtype)
    return quantised.replace(folded=recipe.folded)


@functools.lru_cache(maxsize=64)
def _layout(recipe: Recipe, shape: tuple[int, int], dtype: str) -> Layout:
    """Return the layout of a quantised weight [out, in], by tracing alone."""
    made: list[Made | MadeCodebook] = []

    def make(weight: jax.Array) -> Any:
        made.append(recipe.made(weight, None, dtype))
        return made[0].parts

    jax.eval_shape(make, jax.ShapeDtypeStruct(shape, np.float32))
    return made[0].layout


def _unread(part: str) -> np.ndarray:
    raise AssertionError(f"{part} of a weight that is described alone")


@dataclasses.dataclass(frozen=True)
class Loading:
    """A model that is loaded and quantised.

    Attributes:
        files: its files.
        model: the model as it is in them, with lazily read parameters (`jaxinfer.weights.load.Deferred`).
        specs: specs of the quantised parameters: those of `described`, possibly with copied heads.
        recipe: how they are quantised.
        calibration: samples of text; None: the recipe needs none.
    """

    files: ModelFiles
    model: Model
    specs: ParamTree
    recipe: Recipe
    calibration: Calibration | None = None

    def load(self, place: Place) -> dict[str, Any]:
        """Return the parameters. In memory are at most those that are placed, and one layer.

        Raises:
            CheckpointError: a tensor is invalid.
        """
        work = Work(self.files, self.model, self.recipe, self.calibration, measures=self.calibration is not None)
        for kind in work.summary.kept:
            _log.warning(f"{kind.count} weights {kind.name} stay unquantised: {kind.reason}")
        batches = None if self.calibration is None else first_batches(work)
        params = {name: self._plain(work, name, place) for name in work.rest}
        for index in range(work.layers):
            params |= self._layer(work, index, batches, place)
        return {name: params[name] for name in self.specs}

    def _plain(self, work: Work, name: str, place: Place) -> Any:
        def placed(path: Path, spec: ParamSpec) -> Any:
            return jax.block_until_ready(place(path, spec, work.value(path).fill))

        return map_specs(placed, {name: self.specs[name]})[name]

    def _layer(self, work: Work, index: int, batches: Sequence[Batch] | None, place: Place) -> Any:
        """Return the parameters of one layer; ``batches`` become what the next one reads."""
        layer, specs = work.layer(index), {layer_name(index): self.specs[layer_name(index)]}
        made = _quantized(work, layer, batches)
        weights = {
            name: StoredWeight(linear.shape, _layout(self.recipe, linear.shape, work.dtype), made[name], 0)
            for name, linear in work.taken(index).items()
        }
        plain = _LayerTensors(self.files.path, layer, work.dtype)
        stored = StoredCheckpoint(plain, weights, frozenset(weights), specs)
        return load_params(stored, specs, work.dtype, place)


def _quantized(
    work: Work, layer: LayerWeights, batches: Sequence[Batch] | None
) -> dict[str, Callable[[str], np.ndarray]]:
    """Return functions that read a part of each quantised weight. Without samples it is quantised by the first call."""
    if batches is None:
        return {name: _lazily(work, layer, linear) for name, linear in work.taken(layer.index).items()}
    made = {name: _on_host(weight) for name, weight in quantized(work, layer, batches).items()}
    passed(work.module, layer, batches)
    return {name: parts.__getitem__ for name, parts in made.items()}


def _lazily(work: Work, layer: LayerWeights, linear: Linear) -> Callable[[str], np.ndarray]:
    parts = functools.cache(lambda: _on_host(quantized_weight(work, layer, linear)))
    return lambda part: parts()[part]


def _on_host(weight: Made | MadeCodebook) -> dict[str, np.ndarray]:
    return {name: np.asarray(part) for name, part in weight.parts.items()}


class _LayerTensors:
    """The tensors of a layer as a checkpoint: gathered from its parameters when they are read."""

    def __init__(self, folder: pathlib.Path, layer: LayerWeights, dtype: str) -> None:
        self.folder = folder
        self._layer = layer
        self._dtypes = {name: layer.dtype(name, dtype) for name in layer.places}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: self._info(name, places[0][1].shape) for name, places in layer.places.items()}
        )

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        dtype = self._dtypes[name]
        return TensorInfo(name, CODES[dtype], shape, 0, math.prod(shape) * dtype.itemsize)

    def read(self, name: str) -> np.ndarray:
        return self._layer.tensor(name).astype(self._dtypes[name])

    def expect(self, name: str, part: np.ndarray) -> None:
        """Do nothing: tensors are gathered when they are read."""

    def release(self, name: str) -> None:
        """Do nothing: a tensor is in a new buffer."""
