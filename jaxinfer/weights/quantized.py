"""Checkpoints whose weights are stored quantised: what an adapter of a format says of each, and one face for all.

An adapter (jaxinfer/weights/formats) reads the tensors of one format and gives a `StoredWeight` for each quantised
weight. `storages` then turns a family's parameters, which name plain tensors, into parameters that are made of the
stored parts; `StoredCheckpoint` has these parts as tensors, so that they are loaded as all others are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.quant import Quantized, Split
from jaxinfer.quant.layouts import Layout, Part
from jaxinfer.types import ParamSpec, ParamTree, Source, map_specs, walk_specs
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.safetensors.checkpoint import Tensors
from jaxinfer.weights.safetensors.reader import TensorInfo

_BETWEEN = "#"  # of a weight's name and a part's


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A weight as a checkpoint stores it, turned to ``[*stack, out, in]`` whatever the format has.

    Attributes:
        shape: ``[*stack, out, in]``: a stack of matrices where the format has one tensor for all experts.
        layout: how its values are to lie in memory.
        read: the array of a part by its name, ``[*stack, out, *part.shape]`` (an input part: ``[*part.shape]``), in
            the part's dtype, in a new buffer. It may raise CheckpointError.
        nbytes: that it takes in the checkpoint.
        inputs_digest: equal for two weights of one layout whose input parts are equal: they can be fused.
    """

    shape: tuple[int, ...]
    layout: Layout
    read: Callable[[str], np.ndarray]
    nbytes: int
    inputs_digest: str = ""

    @property
    def parts(self) -> dict[str, Part]:
        return self.layout.parts(self.shape[-1])

    @property
    def input_parts(self) -> dict[str, Part]:
        return self.layout.input_parts(self.shape[-1])

    def dense(self) -> np.ndarray:
        """The weight in float32."""
        arrays = {name: jnp.asarray(self.read(name)) for name in (*self.parts, *self.input_parts)}
        axes = (None,) * len(self.shape)
        return np.asarray(Quantized(arrays, self.layout, axes, "float32", self.shape[-1]).dequantize())


class StoredCheckpoint:
    """A checkpoint's plain tensors, beside its stored weights as parameters ask for them: in parts, or as numbers.

    Args:
        plain: all of the checkpoint's tensors.
        weights: the stored weights by the names that parameters have for them.
        consumed: which of the plain tensors they are made of.
        specs: the parameters, from `storages`.
    """

    def __init__(
        self, plain: Tensors, weights: Mapping[str, StoredWeight], consumed: frozenset[str], specs: ParamTree
    ) -> None:
        self.folder = plain.folder
        self._plain = plain
        self._reads: dict[str, Callable[[], np.ndarray]] = {}
        infos = {name: info for name, info in plain.tensors.items() if name not in consumed}
        wanted = _required(specs)
        for name, weight in weights.items():
            for part, form in {**weight.parts, **weight.input_parts}.items():
                label = name + _BETWEEN + part
                if label in wanted:
                    self._add(infos, label, form.dtype, wanted[label][0], _Part(weight, part))
            if name in wanted or not any(label.startswith(name + _BETWEEN) for label in infos):
                shape, upright = wanted.get(name, (weight.shape, True))
                self._add(infos, name, "F32", shape, _Dense(weight, upright))
        for name in [name for name in infos if name not in wanted and self._adds_nothing(name, weights)]:
            del infos[name]
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(infos)

    def _adds_nothing(self, name: str, weights: Mapping[str, StoredWeight]) -> bool:
        """A bias of zeros beside a stored weight: some tools write one for layers that have none."""
        module, bias, rest = name.rpartition(".bias")
        return bool(bias) and not rest and f"{module}.weight" in weights and not self._plain.read(name).any()

    def _add(
        self,
        infos: dict[str, TensorInfo],
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        read: Callable[[], np.ndarray],
    ) -> None:
        infos[name] = TensorInfo(name, dtype, shape, 0, 4 * math.prod(shape))
        self._reads[name] = read

    def read(self, name: str) -> np.ndarray:
        """See `Checkpoint.read`; of a stored weight a new buffer."""
        return self._reads[name]() if name in self._reads else self._plain.read(name)

    def expect(self, name: str, part: np.ndarray) -> None:
        """See `Checkpoint.expect`."""
        if name not in self._reads:
            self._plain.expect(name, part)

    def release(self, name: str) -> None:
        """See `Checkpoint.release`."""
        if name not in self._reads:
            self._plain.release(name)


@dataclasses.dataclass(frozen=True)
class _Part:
    weight: StoredWeight
    name: str

    def __call__(self) -> np.ndarray:
        return self.weight.read(self.name)


@dataclasses.dataclass(frozen=True)
class _Dense:
    weight: StoredWeight
    upright: bool

    def __call__(self) -> np.ndarray:
        numbers = self.weight.dense()
        return numbers if self.upright else np.swapaxes(numbers, -1, -2)


def _required(specs: ParamTree) -> dict[str, tuple[tuple[int, ...], bool]]:
    """The tensors that parameters are made of, with the shape that each is to have, and whether it is [out, in]."""
    sources = ((spec, source) for _, spec in walk_specs(specs) for source in spec.sources)
    return {source.name: (source.shape, is_upright(spec, source)) for spec, source in sources}


def is_upright(spec: ParamSpec, source: Source) -> bool:
    """The checkpoint's own order is [out, in]: as of all linear layers, but for the few that were convolutions once."""
    return spec.inputs is None or source.transpose == (spec.inputs == 0)


# --------------------------------------------------------------------------------------------------------------
# From parameters of plain tensors to parameters of parts.


def storages(specs: ParamTree, weights: Mapping[str, StoredWeight], dtype: str) -> ParamTree:
    """The parameters with storages for those that the checkpoint holds quantised.

    Args:
        weights: by the names of the tensors that the parameters' sources ask for.
        dtype: of the model: that of values where nothing else says so.

    Raises:
        CheckpointError: a weight's shape is not what config.json asks for, or the parts of a fused parameter are stored
            in ways that do not go together.
    """

    def stored(path: tuple[str, ...], spec: ParamSpec) -> Any:
        if spec.inputs is None or not any(source.name in weights for source in spec.sources):
            return spec
        return _Fused("/".join(path), spec, weights, dtype).made()

    made: ParamTree = map_specs(stored, specs)
    return made


@dataclasses.dataclass(frozen=True)
class _Piece:
    """One source of a fused parameter, seen as ``[*out, in]``.

    Attributes:
        weight: None where the checkpoint holds it as plain numbers.
        where: its place among the parameter's outputs.
        out: the form in which it lies there.
        stack: leading dimensions of the tensor of which one entry is taken, and its part of the outputs.
    """

    source: Source
    weight: StoredWeight | None
    where: tuple[slice | int, ...]
    out: tuple[int, ...]
    part: tuple[slice | int, ...]

    @property
    def kind(self) -> tuple[Layout | None, str]:
        return (self.weight.layout, self.weight.inputs_digest) if self.weight else (None, "")


@dataclasses.dataclass(frozen=True)
class _Fused:
    """A parameter of which some sources are stored quantised."""

    label: str
    spec: ParamSpec
    weights: Mapping[str, StoredWeight]
    dtype: str

    @property
    def _first(self) -> bool:
        """The inputs are the parameter's first dimension, not its last."""
        return self.spec.inputs == 0

    @property
    def _out(self) -> tuple[int, ...]:
        return self.spec.shape[1:] if self._first else self.spec.shape[:-1]

    @property
    def _axes(self) -> tuple[str | None, ...]:
        axes = self.spec.axes
        return (*axes[1:], axes[0]) if self._first else axes

    @property
    def _inputs(self) -> int:
        return self.spec.shape[0] if self._first else self.spec.shape[-1]

    def made(self) -> Any:
        pieces = [self._piece(source) for source in self.spec.sources]
        if len({piece.kind for piece in pieces}) == 1:
            return self._quantized(pieces, self._out)
        return self._split(pieces)

    def _piece(self, source: Source) -> _Piece:
        weight = self.weights.get(source.name)
        upright = is_upright(self.spec, source)
        *stack, rows, columns = source.shape
        shape = (*stack, rows, columns) if upright else (*stack, columns, rows)
        if weight is not None and weight.shape != shape:
            raise CheckpointError(
                f"the stored weight {quoted(source.name)} is {list(weight.shape)} where config.json asks {list(shape)}"
            )
        part = (*source.part, *(slice(None),) * (len(shape) - len(source.part)))
        part = part[:-1] if upright else (*part[:-2], part[-1])
        where, form = source.where, source.reshape
        if self._first:
            where, out = where[1:], None if form is None else form[1:]
        else:
            where, out = where[: len(self._out)], None if form is None else form[:-1]
        rows_taken = len(range(shape[-2])[part[-1]]) if isinstance(part[-1], slice) else 1
        return _Piece(source, weight, where, out or (rows_taken,), part)

    def _quantized(self, pieces: list[_Piece], out: tuple[int, ...]) -> Any:
        weight = pieces[0].weight
        if weight is None:
            return self._array(pieces, out)
        arrays = {name: self._part_spec(name, part, pieces, out) for name, part in weight.parts.items()}
        for name, part in weight.input_parts.items():
            source = Source(pieces[0].source.name + _BETWEEN + name, part.shape)
            arrays[name] = ParamSpec(part.shape, self._along(part), sources=(source,), dtype=part.dtype)
        return Quantized(arrays, weight.layout, self._axes, self.dtype, self._inputs)

    def _part_spec(self, name: str, part: Part, pieces: list[_Piece], out: tuple[int, ...]) -> ParamSpec:
        sources = tuple(
            Source(
                piece.source.name + _BETWEEN + name,
                (*_shape(piece)[:-1], *part.shape),
                reshape=(*piece.out, *part.shape),
                where=piece.where,
                part=piece.part,
            )
            for piece in pieces
        )
        shape, axes = (*out, *part.shape), (*self._axes[:-1], *self._along(part))
        return ParamSpec(shape, axes, sources=sources, dtype=part.dtype)

    def _array(self, pieces: list[_Piece], out: tuple[int, ...]) -> ParamSpec:
        """Spec of plain numbers beside stored ones: they lie as ``[*out, in]``, too."""
        sources = tuple(
            Source(
                piece.source.name,
                piece.source.shape,
                transpose=piece.source.transpose != self._first,
                reshape=(*piece.out, self._inputs),
                where=piece.where,
                part=piece.source.part,
            )
            for piece in pieces
        )
        return ParamSpec((*out, self._inputs), self._axes, sources=sources)

    def _along(self, part: Part) -> tuple[str | None, ...]:
        if not part.shape:
            return ()
        return (self._axes[-1] if part.along else None, *(None,) * (len(part.shape) - 1))

    def _split(self, pieces: list[_Piece]) -> Split:
        """Split a weight along one dimension of the outputs, neighbours of one kind in one storage."""
        axis = self._axis(pieces)
        runs: list[list[_Piece]] = []
        for piece in sorted(pieces, key=lambda piece: _begin(piece.where[axis])):
            if runs and runs[-1][0].kind == piece.kind:
                runs[-1].append(piece)
            else:
                runs.append([piece])
        return Split(tuple(self._run(run, axis) for run in runs), axis)

    def _axis(self, pieces: list[_Piece]) -> int:
        """A dimension of which each place has one kind."""
        for axis in range(len(self._out)):
            kinds = {(_at(piece.where, axis), piece.kind) for piece in pieces}
            if len({place for place, _ in kinds}) == len(kinds):
                return axis
        found = sorted({str(piece.kind[0]) for piece in pieces})
        raise CheckpointError(f"{self.label} would be made of weights that are stored in different ways: {found}")

    def _run(self, run: list[_Piece], axis: int) -> Any:
        begin = min(_begin(piece.where[axis]) for piece in run)
        moved = [dataclasses.replace(piece, where=_shifted(piece.where, axis, begin)) for piece in run]
        size = max(_end(piece.where[axis]) for piece in moved)
        return self._quantized(moved, (*self._out[:axis], size, *self._out[axis + 1 :]))


def _shape(piece: _Piece) -> tuple[int, ...]:
    assert piece.weight is not None
    return piece.weight.shape


def _at(where: tuple[slice | int, ...], axis: int) -> slice | int:
    return where[axis] if axis < len(where) else slice(None)


def _begin(place: slice | int) -> int:
    return (place.start or 0) if isinstance(place, slice) else place


def _end(place: slice | int) -> int:
    return int(place.stop) if isinstance(place, slice) else place + 1


def _shifted(where: tuple[slice | int, ...], axis: int, by: int) -> tuple[slice | int, ...]:
    place = where[axis]
    moved = slice(_begin(place) - by, _end(place) - by) if isinstance(place, slice) else place - by
    return (*where[:axis], moved, *where[axis + 1 :])
