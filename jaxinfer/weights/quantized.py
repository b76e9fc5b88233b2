"""Quantised checkpoints: `StoredWeight`, the common description of a quantised weight, and the specs built from it.

A format adapter (jaxinfer/weights/formats) reads the tensors of one format and returns a `StoredWeight` for each
quantised weight. `storages` then turns a family's specs, which name unquantized tensors, into specs made of the stored
parts; `StoredCheckpoint` exposes these parts as tensors, so that they are loaded like any other tensor.
"""

from __future__ import annotations

import dataclasses
import functools
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

_BETWEEN = "#"  # separates a weight's name from a part's name


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A weight as a checkpoint stores it, with shape ``[*stack, out, in]`` for every format.

    Attributes:
        shape: ``[*stack, out, in]``: a stack of matrices if the format has one tensor for all experts.
        layout: layout of the values in memory.
        read: returns the array of a part by name, ``[*stack, out, *part.shape]`` (an input part: ``[*part.shape]``), in
            the dtype of the part, in a new buffer. It may raise CheckpointError.
        nbytes: size in the checkpoint.
        inputs_digest: equal for two weights of one layout whose input parts are equal, which can then be fused.
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
        """Dequantize the weight to float32."""
        arrays = {name: jnp.asarray(self.read(name)) for name in (*self.parts, *self.input_parts)}
        axes = (None,) * len(self.shape)
        return np.asarray(Quantized(arrays, self.layout, axes, "float32", self.shape[-1]).dequantize())


class StoredCheckpoint:
    """A checkpoint's unquantized tensors, and its stored weights as the specs request them: in parts, or dequantized.

    Args:
        plain: all tensors of the checkpoint.
        weights: the stored weights by the names that the specs use.
        consumed: names of the tensors in ``plain`` that make up the stored weights.
        specs: the specs that `storages` returned.
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
                    self._add(infos, label, form.dtype, wanted[label][0], functools.partial(weight.read, part))
            if name in wanted or not any(label.startswith(name + _BETWEEN) for label in infos):
                shape, upright = wanted.get(name, (weight.shape, True))
                self._add(infos, name, "F32", shape, functools.partial(_dense, weight, upright))
        for name in [name for name in infos if name not in wanted and self._adds_nothing(name, weights)]:
            del infos[name]
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(infos)

    def _adds_nothing(self, name: str, weights: Mapping[str, StoredWeight]) -> bool:
        """Return whether a tensor is an all-zero bias of a stored weight: some tools write one for bias-free layers."""
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
        """Return a tensor as `Checkpoint.read` does; for a stored weight, in a new buffer."""
        return self._reads[name]() if name in self._reads else self._plain.read(name)

    def expect(self, name: str, part: np.ndarray) -> None:
        """See `Checkpoint.expect`."""
        if name not in self._reads:
            self._plain.expect(name, part)

    def release(self, name: str) -> None:
        """See `Checkpoint.release`."""
        if name not in self._reads:
            self._plain.release(name)


def _dense(weight: StoredWeight, upright: bool) -> np.ndarray:
    numbers = weight.dense()
    return numbers if upright else np.swapaxes(numbers, -1, -2)


def _required(specs: ParamTree) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Map the tensors that the specs read to the requested shape and whether it is [out, in]."""
    sources = ((spec, source) for _, spec in walk_specs(specs) for source in spec.sources)
    return {source.name: (source.shape, is_upright(spec, source)) for spec, source in sources}


def is_upright(spec: ParamSpec, source: Source) -> bool:
    """Return whether the checkpoint stores [out, in]: true of linear layers except former convolutions."""
    return spec.inputs is None or source.transpose == (spec.inputs == 0)


# --------------------------------------------------------------------------------------------------------------
# Specs of stored parts from specs of unquantized tensors.


def storages(specs: ParamTree, weights: Mapping[str, StoredWeight], dtype: str) -> ParamTree:
    """Return the specs with quantised storages for the parameters that the checkpoint holds quantised.

    Args:
        weights: stored weights by the tensor names of the specs' sources.
        dtype: dtype of the model, used for values whose dtype nothing else sets.

    Raises:
        CheckpointError: a weight's shape does not match config.json, or the sources of a fused parameter are stored in
            incompatible ways.
    """

    def stored(path: tuple[str, ...], spec: ParamSpec) -> Any:
        if spec.inputs is None or not any(source.name in weights for source in spec.sources):
            return spec
        return _Fused("/".join(path), spec, weights, dtype).made()

    made: ParamTree = map_specs(stored, specs)
    return made


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A source of a fused parameter, seen as ``[*out, in]``.

    Attributes:
        weight: the stored weight; None if the checkpoint holds the tensor unquantized.
        where: index of the source among the parameter's outputs.
        out: shape of the outputs at that index.
        part: index into the tensor: entries of its leading stack dimensions, and the rows taken.
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
    """A parameter some of whose sources are stored quantised."""

    label: str
    spec: ParamSpec
    weights: Mapping[str, StoredWeight]
    dtype: str

    @property
    def _first(self) -> bool:
        """Whether the inputs are the first dimension of the parameter, not the last."""
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
        if out is None:
            taken = (range(size)[at] for size, at in zip(shape[:-1], part, strict=True))
            out = tuple(len(entries) for entries in taken if isinstance(entries, range))
        return _Piece(source, weight, where, out, part)

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
        """Return the spec of the unquantized slice of a split weight, stored as ``[*out, in]`` as well."""
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
        """Split a weight along one output dimension; adjacent pieces of one kind share a storage."""
        axis = self._axis(pieces)
        runs: list[list[_Piece]] = []
        for piece in sorted(pieces, key=lambda piece: _begin(piece.where[axis])):
            if runs and runs[-1][0].kind == piece.kind:
                runs[-1].append(piece)
            else:
                runs.append([piece])
        return Split(tuple(self._run(run, axis) for run in runs), axis)

    def _axis(self, pieces: list[_Piece]) -> int:
        """Return an output dimension along which each index has a single kind."""
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
