"""A model layer in terms of checkpoint tensors: its linear weights and their location in the parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from jaxinfer.layers.base import Layer
from jaxinfer.types import ParamSpec, Source
from jaxinfer.weights.tree import Path, as_placed, as_stored

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
Values = dict[Path, np.ndarray]


def linears(specs: Specs) -> list[Linear]:
    """Return all weights of a layer that can be quantised one by one, as [out, in]."""
    places: dict[str, list[tuple[Path, Source]]] = {}
    for path, spec in specs.items():
        for source in spec.sources:
            places.setdefault(source.name, []).append((path, source))
    return [found for name, where in places.items() if (found := _linear(specs, name, where)) is not None]


def _linear(specs: Specs, name: str, places: list[tuple[Path, Source]]) -> Linear | None:
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


def tensors(specs: Specs, values: Values) -> dict[str, tuple[np.ndarray, str | None]]:
    """Return all tensors by name, each with its fixed dtype (None: the model's dtype)."""
    found: dict[str, tuple[np.ndarray, str | None]] = {}
    for path, spec in specs.items():
        for source in spec.sources:
            whole = found.setdefault(source.name, (np.empty(source.shape, np.float32), spec.dtype))[0]
            whole[source.part or ...] = as_stored(values[path][source.where], source)
    return found


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """A layer's parameters on the host, in float32 and mutable.

    Attributes:
        block: the Flax module of the layer.
        specs: its parameter specs by path within the layer.
        values: its parameter values by path within the layer.
    """

    block: Layer
    specs: Specs
    values: Values

    def weight(self, linear: Linear) -> Float[np.ndarray, "out k"]:
        """Gather a linear weight in its checkpoint shape."""
        whole = np.empty(linear.shape, np.float32)
        for path, source in linear.places:
            whole[source.part or ...] = as_stored(self.values[path][source.where], source)
        return whole

    def replace(self, linear: Linear, weight: Float[np.ndarray, "out k"]) -> None:
        """Write a linear weight back to the parameters: the inverse of `weight`."""
        for path, source in linear.places:
            self.values[path][source.where] = as_placed(weight, source)
