"""State of a quantisation run: a model, a recipe, and the weights that the recipe applies to."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np

from jaxinfer.formats.multimodal import component
from jaxinfer.layers.base import Layer
from jaxinfer.models.model import Model
from jaxinfer.opening import described_by
from jaxinfer.quant.make.formats import Stored, config_of
from jaxinfer.quant.make.recipe import Recipe, RecipeError
from jaxinfer.quantize.calibration import Calibration
from jaxinfer.quantize.layer import LayerWeights, Linear, linears
from jaxinfer.quantize.summary import Summary
from jaxinfer.types import VISION, ParamTree, walk_specs
from jaxinfer.weights.files import ModelFiles
from jaxinfer.weights.tree import Path

_WITHIN = re.compile(r"^(?:.*?\.)?\d+\.(.+)$")  # the name after a layer's number


@dataclasses.dataclass(frozen=True)
class Work:
    """Inputs of a run that all layers share.

    Attributes:
        calibration: None if the recipe needs none.
        measures: compare quantised weights with the given ones, for the summary.
    """

    files: ModelFiles
    model: Model
    recipe: Recipe
    calibration: Calibration | None
    measures: bool = True

    @property
    def module(self) -> Any:
        return self.model.module

    @property
    def dtype(self) -> str:
        return str(self.model.dtype)

    @property
    def stored(self) -> Stored:
        return self.recipe.stored(self.dtype)

    @property
    def layers(self) -> int:
        return len(self.model.config.layers)

    @functools.cached_property
    def specs(self) -> ParamTree:
        """The model's specs, with the source's tensor names; of a wrapped model, its experts one by one, and without a
        vision tower the names of the text model alone."""
        if not self.files.wrapped:
            return self.files.named(self.model.specs, self.model.family.prefix)
        if self.model.vision is None:
            return self.model.specs
        return self.files.spelled(self.model.specs, self.model.family.prefix)

    @property
    def rest(self) -> dict[str, Any]:
        """The parameters outside of the layers."""
        return {name: node for name, node in self.specs.items() if not name.startswith("layers_")}

    @property
    def tower(self) -> dict[str, np.ndarray]:
        """The tensors of a vision tower and its projector, as they are in the source."""
        outside = [] if self.model.vision is None else self.files.outside
        return {name: self.files.tensors.read(name) for name in outside}

    @property
    def towers(self) -> list[str]:
        """First components of the names of a vision tower's tensors."""
        specs = walk_specs(self.specs.get(VISION, {}))
        return sorted({component(source.name) for _, spec in specs for source in spec.sources})

    def linears(self, index: int) -> list[Linear]:
        """Return the linear weights of a layer."""
        return linears(dict(walk_specs(self.specs[layer_name(index)])))

    @functools.cached_property
    def summary(self) -> Summary:
        """Kinds of the model's weights; the run records its results there."""
        return Summary(self.recipe, map(self.linears, range(self.layers)))

    def layer(self, index: int) -> LayerWeights:
        """Return one layer, read if it is to be run, and otherwise a weight at a time."""
        name = layer_name(index)
        specs = dict(walk_specs(self.specs[name]))
        values = {path: self.value((name, *path)) for path in specs}
        if self.calibration is not None:
            values = {path: np.array(value, np.float32) for path, value in values.items()}
        return LayerWeights(index, self.block(index), specs, values)

    def block(self, index: int) -> Layer:
        """Return the Flax module of a layer."""
        block: Layer = self.module.block(index, dict(self.module.overrides).get(index))
        return block

    def value(self, path: Path) -> Any:
        """Return the parameter at a path."""
        node: Any = self.model.params
        for key in path:
            node = node[key]
        return node

    @functools.cached_property
    def config_json(self) -> dict[str, Any]:
        """The config.json of the output.

        Raises:
            RecipeError: the recipe applies to none of the model's weights.
        """
        config = {key: value for key, value in described_by(self.files, self.model).items() if key != "torch_dtype"}
        return {**config, "dtype": self.dtype, "quantization_config": self._quantization()}

    def require_taken(self) -> None:
        """Raise RecipeError if the recipe applies to none of the model's weights."""
        if not any(map(self.taken, range(self.layers))):
            advice = f": try {self.summary.advice}" if self.summary.advice else ""
            raise RecipeError(f"{self.recipe.method} cannot take any weight of this model ({self._why()}){advice}")

    def _quantization(self) -> dict[str, Any]:
        self.require_taken()
        dense: list[str] = []
        inside: dict[str, None] = {}
        for index in range(self.layers):
            taken = self.taken(index)
            for name in _matrices(self.specs[layer_name(index)]):
                module = name.removesuffix(".weight")
                if name in taken:
                    inside[_within(module)] = None
                else:
                    dense.append(module)
        return config_of(self.stored, dense, list(inside), self.towers)

    def taken(self, index: int) -> dict[str, Linear]:
        """Return the weights of a layer that are quantised, by name."""
        return {linear.name: linear for linear in self.linears(index) if not self.recipe.refusal(*linear.shape)}

    def _why(self) -> str:
        reasons = (f"{linear.name}: {self.recipe.refusal(*linear.shape)}" for linear in self.linears(0))
        return next(reasons, "its layers have no linear weights of their own")


def layer_name(index: int) -> str:
    """Return the name of a layer's parameters."""
    return f"layers_{index}"


def _matrices(specs: Any) -> dict[str, None]:
    """Return the tensors of a layer that could be linear weights, in the order of its parameters."""
    sources = (source for _, spec in walk_specs(specs) for source in spec.sources)
    return {source.name: None for source in sources if len(source.shape) == 2 and source.name.endswith(".weight")}


def _within(module: str) -> str:
    found = _WITHIN.match(module)
    return found.group(1) if found else module
