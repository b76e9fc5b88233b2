"""A model layer in terms of checkpoint tensors: its linear weights and their location in the parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxinfer.layers.base import Layer
from jaxinfer.types import ParamSpec, Source
from jaxinfer.weights.tree import Path, as_placed, as_stored, target_dtype

_WEIGHT = ".weight"


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear weight [out, in] of the checkpoint.

    Attributes:
        name: name of the tensor.
        shape: [out, in].
        places: parameters that contain it, with the source in each.
        expert: index of its expert; None: it is no expert weight.
    """

    name: str
    shape: tuple[int, int]
    places: tuple[tuple[Path, Source], ...]
    expert: int | None

    @property
    def module(self) -> str:
        return self.name.removesuffix(_WEIGHT)

    @property
    def path(self) -> Path:
        """Path of the parameter whose inputs it reads; all of its places have the same inputs."""
        return self.places[0][0]


Specs = Mapping[Path, ParamSpec]
Places = Mapping[str, Sequence[tuple[Path, Source]]]


def places_of(specs: Specs) -> Places:
    """Return the parameters that contain each tensor, with its source in each."""
    places: dict[str, list[tuple[Path, Source]]] = {}
    for path, spec in specs.items():
        for source in spec.sources:
            places.setdefault(source.name, []).append((path, source))
    return places


def gathered(values: Mapping[Path, Any], places: Sequence[tuple[Path, Source]]) -> Float[np.ndarray, "*shape"]:
    """Gather a tensor, in its checkpoint shape, from the parameters that contain it."""
    whole = np.empty(places[0][1].shape, np.float32)
    for path, source in places:
        whole[source.part or ...] = as_stored(values[path][source.where], source)
    return whole


def linears(specs: Specs) -> list[Linear]:
    """Return all weights of a layer that can be quantised one by one, as [out, in]."""
    return [found for name, where in places_of(specs).items() if (found := _linear(specs, name, where)) is not None]


def _linear(specs: Specs, name: str, places: Sequence[tuple[Path, Source]]) -> Linear | None:
    if not name.endswith(_WEIGHT) or not all(_upright(specs[path], source) for path, source in places):
        return None
    path, source = places[0]
    expert = source.where[0] if specs[path].axes[0] == "expert" else None
    if isinstance(expert, slice):
        return None
    rows, columns = source.shape
    return Linear(name, (rows, columns), tuple(places), expert)


def _upright(spec: ParamSpec, source: Source) -> bool:
    """Return whether the checkpoint has [out, in] and an observable product reads it."""
    return spec.inputs is not None and len(source.shape) == 2 and source.transpose == (spec.inputs == 0)


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """A layer's parameters.

    Attributes:
        index: its number in the model.
        block: the Flax module of the layer.
        specs: its parameter specs by path within the layer.
        values: its parameter values by path within the layer: on the host, in float32 and mutable; or, of a layer that
            is never run, `jaxinfer.weights.load.Deferred`.
    """

    index: int
    block: Layer
    specs: Specs
    values: dict[Path, Any]

    @functools.cached_property
    def places(self) -> Places:
        return places_of(self.specs)

    def tensor(self, name: str) -> Float[np.ndarray, "*shape"]:
        """Gather a tensor in its checkpoint shape, as float32."""
        return gathered(self.values, self.places[name])

    def dtype(self, name: str, default: str) -> np.dtype[Any]:
        """Return the dtype of a tensor in a checkpoint, which its parameter may fix."""
        return target_dtype(self.specs[self.places[name][0][0]].dtype or default)

    def weight(self, linear: Linear) -> Float[np.ndarray, "out k"]:
        """Gather a linear weight in its checkpoint shape."""
        return self.tensor(linear.name)

    def replace(self, linear: Linear, weight: Float[np.ndarray, "out k"]) -> None:
        """Write a linear weight back to the parameters: the inverse of `weight`."""
        for path, source in linear.places:
            self.values[path][source.where] = as_placed(weight, source)
