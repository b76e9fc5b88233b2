"""Layer of a model in terms of its checkpoint's tensors: which are linear weights, and where they lie."""

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
    """A tensor [out, in] of the checkpoint that products read.

    Attributes:
        name: of the tensor.
        shape: [out, in].
        places: the parameters it is a part of, and how.
        expert: which one's it is; None: the layer has it once.
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
        """The parameter of whose inputs it reads; all of its places have the same."""
        return self.places[0][0]


Specs = Mapping[Path, ParamSpec]
Values = dict[Path, np.ndarray]


def linears(specs: Specs) -> list[Linear]:
    """All weights of a layer that can be quantised one by one, as [out, in]."""
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
    """The checkpoint has [out, in], and a product that can be observed reads it."""
    return spec.inputs is not None and len(source.shape) == 2 and source.transpose == (spec.inputs == 0)


def tensors(specs: Specs, values: Values) -> dict[str, tuple[np.ndarray, str | None]]:
    """All tensors by name, each with the dtype that it keeps whatever the model's (None: the model's)."""
    found: dict[str, tuple[np.ndarray, str | None]] = {}
    for path, spec in specs.items():
        for source in spec.sources:
            whole = found.setdefault(source.name, (np.empty(source.shape, np.float32), spec.dtype))[0]
            whole[source.part or ...] = as_stored(values[path][source.where], source)
    return found


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """A layer's parameters on the host, in float32 and to be changed in place.

    Attributes:
        block: what the layer computes.
        specs: its parameters by their path within the layer.
        values: the same.
    """

    block: Layer
    specs: Specs
    values: Values

    def weight(self, linear: Linear) -> Float[np.ndarray, "out k"]:
        """Gather a linear weight as the checkpoint has it."""
        whole = np.empty(linear.shape, np.float32)
        for path, source in linear.places:
            whole[source.part or ...] = as_stored(self.values[path][source.where], source)
        return whole

    def replace(self, linear: Linear, weight: Float[np.ndarray, "out k"]) -> None:
        """The inverse: it takes its place in the parameters."""
        for path, source in linear.places:
            self.values[path][source.where] = as_placed(weight, source)
