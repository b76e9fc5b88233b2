"""Mapping of PEFT module names to a model's parameters, from specs alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxinfer.types import EMBEDDING, HEAD, ParamSpec, ParamTree, Source, walk_specs
from jaxinfer.weights.tree import as_placed

Path = tuple[str, ...]
_TIED_HEAD = "lm_head"  # module name in transformers of a head that is tied to the embedding table

_EXPERT = re.compile(r"(?P<layer>.*)\.(?:block_sparse_moe|mlp)\.experts(?:\.\d+\.\w+\.weight|\.(?:gate_up|down)_proj)")


@dataclasses.dataclass(frozen=True)
class Place:
    """A slice of a module's outputs, and its location in a parameter.

    Attributes:
        path: path of the parameter.
        source: mapping of the module's matrix into the parameter.
        expert: index of the expert; None: the parameter has no experts.
    """

    path: Path
    spec: ParamSpec
    source: Source
    expert: int | None = None

    @property
    def of_rows(self) -> bool:
        """Whether rows of the parameter are looked up by token: then the inputs are the rows."""
        return self.path == EMBEDDING

    @property
    def inputs_first(self) -> bool:
        """Whether inputs are the first dimension of the parameter (of one expert), not the last."""
        return input_axis(self.path, self.spec) != -1

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of inputs and outputs of the module."""
        first, last = self.source.shape
        return (last, first) if self._out_in else (first, last)

    @property
    def _out_in(self) -> bool:
        """Whether the module's own matrix is [out, in], as most are; GPT-2's and embedding tables are [in, out]."""
        return self.inputs_first == self.source.transpose

    @property
    def form(self) -> tuple[int, ...]:
        """Output shape of the parameter, or of one of its experts."""
        whole = self.spec.shape if self.expert is None else self.spec.shape[1:]
        return whole[1:] if self.inputs_first else whole[:-1]

    def put(self, outputs: Float32[np.ndarray, "out n"], buffer: Float32[np.ndarray, "*form n"]) -> None:
        """Write ``n`` values of each of the module's outputs to the parameter's positions of these outputs.

        Args:
            buffer: has the output shape of the parameter, or of one of its experts.
        """
        count = outputs.shape[-1]
        matrix = outputs if self._out_in else outputs.T
        shape = self.source.reshape
        if shape is not None:
            shape = (count, *shape[1:]) if self.inputs_first else (*shape[:-1], count)
        placed = as_placed(matrix, dataclasses.replace(self.source, reshape=shape))
        where = self.source.where if self.expert is None else self.source.where[1:]
        target: Any = np.moveaxis(buffer, -1, 0) if self.inputs_first else buffer
        target[(*where, ...)] = placed


def input_axis(path: Path, spec: ParamSpec) -> int:
    """Return the dimension of a parameter that an adapter's A shares; for the embeddings, that of the tokens."""
    if path == EMBEDDING:
        return 0
    return -1 if spec.inputs == -1 else int(bool(spec.axes) and spec.axes[0] == "expert")


@dataclasses.dataclass(frozen=True)
class Places:
    """Adaptable modules and parameters of a model.

    Attributes:
        modules: by module name, the slices of its outputs.
        experts: by the name of a stacked expert tensor, such as "model.layers.0.mlp.experts.gate_up_proj", the places
            of each expert.
        biases: by module name: the path and source of the bias.
        of_paths: any place in each parameter.
        specs: all specs by path; a tied head has a separate entry.
        tied: the head is the embedding table.
        sources: by checkpoint tensor name, its locations.
    """

    modules: Mapping[str, tuple[Place, ...]]
    experts: Mapping[str, tuple[tuple[Place, ...], ...]]
    biases: Mapping[str, tuple[tuple[Path, Source], ...]]
    of_paths: Mapping[Path, Place]
    specs: Mapping[Path, ParamSpec]
    tied: bool
    sources: Mapping[str, tuple[tuple[Path, Source], ...]]


def find_places(specs: ParamTree) -> Places:
    """Build the mapping from a model's specs, as its family declares them (`Model.family.param_specs`)."""
    modules: dict[str, list[Place]] = {}
    fused: dict[str, dict[int, list[Place]]] = {}
    sources: dict[str, list[tuple[Path, Source]]] = {}
    of_paths: dict[Path, Place] = {}
    found = with_tied_head(specs)
    for path, spec in found.items():
        for place in _places(path, spec):
            if len(place.source.shape) == 2:
                modules.setdefault(place.source.name.removesuffix(".weight"), []).append(place)
                of_paths[path] = place
            for name, one in _of_fused(place):
                fused.setdefault(name, {}).setdefault(one.expert or 0, []).append(one)
                of_paths[path] = one
        for source in spec.sources:
            sources.setdefault(source.name, []).append((path, source))
    of_names = {name: tuple(at) for name, at in sources.items()}
    return Places(
        modules={name: tuple(found) for name, found in modules.items()},
        experts={name: tuple(tuple(of[e]) for e in sorted(of)) for name, of in fused.items()},
        biases={
            name.removesuffix(".bias"): at
            for name, at in of_names.items()
            if name.endswith(".bias") and found[at[0][0]].inputs is None
        },
        of_paths=of_paths,
        specs=found,
        tied=HEAD in found and HEAD not in dict(walk_specs(specs)),
        sources=of_names,
    )


def with_tied_head(specs: ParamTree) -> dict[Path, ParamSpec]:
    """Return all specs by path, with a tied head as a separate entry."""
    found = dict(walk_specs(specs))
    if HEAD in found or EMBEDDING not in found or found[EMBEDDING].inputs is None:
        return found
    table = found[EMBEDDING]
    (source,) = table.sources
    named = dataclasses.replace(source, name=f"{_TIED_HEAD}.weight")
    return found | {HEAD: dataclasses.replace(table, sources=(named,))}


def _places(path: Path, spec: ParamSpec) -> Iterator[Place]:
    if spec.inputs is None:
        return
    of_experts = bool(spec.axes) and spec.axes[0] == "expert"
    for source in spec.sources:
        expert = source.where[0] if of_experts and source.where else None
        yield Place(path, spec, source, expert if isinstance(expert, int) else None)


def _of_fused(place: Place) -> Iterator[tuple[str, Place]]:
    """Yield the place as a slice of a stacked expert tensor, as transformers has in memory for any checkpoint."""
    found = _EXPERT.fullmatch(place.source.name)
    if found is None or place.expert is None:
        return
    kind = "gate_up_proj" if place.path[-1] == "gate_up" else "down_proj"
    yield f"{found['layer']}.mlp.experts.{kind}", dataclasses.replace(place, source=_matrix_of_expert(place, kind))


def _matrix_of_expert(place: Place, kind: str) -> Source:
    source = place.source
    if len(source.shape) == 3:  # stored as one tensor: gpt-oss
        return dataclasses.replace(source, shape=source.shape[1:], part=source.part[1:])
    if kind == "down_proj":
        return source
    half = source.where[1]
    assert isinstance(half, int)
    out, inputs = source.shape
    rows = slice(half * out, (half + 1) * out)
    return dataclasses.replace(source, shape=(2 * out, inputs), part=(rows,))


def values_at(source: Source, values: Float32[np.ndarray, "*stored"]) -> Float32[np.ndarray, "*placed"]:
    """Return a module's bias in the shape of the parameter at ``source.where``."""
    return as_placed(values, source)


def room_for(place: Place, rank: int) -> Float32[np.ndarray, "*form rank"]:
    """Return zeros for ``rank`` values of each output of the parameter, or of one of its experts."""
    return np.zeros((*place.form, rank), np.float32)
