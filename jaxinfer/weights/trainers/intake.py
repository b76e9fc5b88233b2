"""From the arrays of a trainer to the parameters of a model."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.formats.multimodal import OTHER_TENSORS
from jaxinfer.types import ParamSpec
from jaxinfer.weights.errors import WeightsError, quoted, shape_text
from jaxinfer.weights.load import HARMLESS
from jaxinfer.weights.trainers.candidates import NAMES, Candidate, Specified, candidates
from jaxinfer.weights.trainers.fuse import Piece, fused
from jaxinfer.weights.trainers.rows import Row
from jaxinfer.weights.trainers.tree import named_arrays
from jaxinfer.weights.tree import Path, dtype_of


def params_from(
    model: Specified, weights: Any, *, names: str | None = None, partial: bool = False, cast: bool = False
) -> dict[str, Any]:
    """Return parameters in a model's own names and shapes from the weights of a trainer.

    Arrays that need no change are returned as they are. Others are made on the host if they are there or on CPUs, and
    on their own devices if not. The result is not placed on the devices of an engine.

    Args:
        model: a `Model`. If it has quantised weights, or others in a layout for kernels, the result has the weights as
            its family declares them, or as the model has them if the given ones are like that.
        weights: a `Model`, a nested dict, an `nnx.State`, another pytree, or an iterable of pairs (name, array).
        names: convention of the names, one of `NAMES`; None finds it.
        partial: parameters may be missing; each of those that are given must be whole.
        cast: convert floating-point arrays to the dtype of the model.

    Raises:
        WeightsError: an array is missing or unknown, or has another shape or dtype; the first one is named.
        TypeError: the weights hold something else than arrays.
    """
    tree: dict[str, Any] = {}
    for (*path, last), array in each_param(model, weights, names=names, partial=partial, cast=cast):
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = array
    return tree


def each_param(
    model: Specified, weights: Any, *, names: str | None = None, partial: bool = False, cast: bool = False
) -> Iterator[tuple[Path, Any]]:
    """Yield the parameters one at a time: as `params_from`, without holding all of those that had to be made.

    A tree is checked before the first parameter is yielded. An iterator is read as it goes: a missing name is found at
    its end.
    """
    if names is not None and names not in NAMES:
        raise WeightsError(f"names must be one of {', '.join(NAMES)}, got {names!r}", "names", NAMES, names)
    if isinstance(weights, Specified):
        weights = weights.params
    pairs, whole = _pairs(weights)
    intake = _Intake(model, names, partial, cast)
    if whole:
        pairs = list(pairs)
        intake.check(pairs)
    yield from intake.read(pairs)


def _pairs(weights: Any) -> tuple[Iterable[tuple[str, Any]], bool]:
    """Return the named arrays, and whether they are all in memory."""
    if isinstance(weights, Iterator):
        return weights, False
    return (weights if isinstance(weights, list | tuple) else named_arrays(weights)), True


class _Board:
    """The parameters of a candidate that are not made yet, with the tensors that each of them waits for."""

    def __init__(self, candidate: Candidate, held: Collection[str] = (), done: Collection[Path] = ()) -> None:
        self.candidate, self.done = candidate, set(done)
        self.waiting: dict[Path, set[str]] = {}
        self.users: dict[str, set[Path]] = {}
        for path, spec in candidate.specs.items():
            if path not in self.done:
                tensors = {source.name for source in spec.sources}
                self.waiting[path] = tensors.difference(held)
                for tensor in tensors:
                    self.users.setdefault(tensor, set()).add(path)

    def arrived(self, tensor: str) -> list[Path]:
        """Return the parameters that have all their tensors with this one."""
        found = sorted(self.users.get(tensor, ()))
        for path in found:
            self.waiting[path].discard(tensor)
        return [path for path in found if not self.waiting[path]]

    def made(self, path: Path) -> list[str]:
        """Return the tensors that no parameter needs after this one."""
        del self.waiting[path]
        self.done.add(path)
        tensors = {source.name for source in self.candidate.specs[path].sources}
        for tensor in tensors:
            self.users[tensor].discard(path)
        return [tensor for tensor in tensors if not self.users[tensor]]


class _Intake:
    """Reads arrays, and keeps each until the parameters that need it are made."""

    def __init__(self, model: Specified, names: str | None, partial: bool, cast: bool) -> None:
        self._dtype, self._partial, self._cast = np.dtype(model.dtype).name, partial, cast
        others = OTHER_TENSORS if getattr(model, "vision", None) is None else ()
        self._ignored = (*HARMLESS, *others, *model.family.ignore, *getattr(model.config, "ignored", ()))
        self._candidates = list(candidates(model, names))
        if not self._candidates:
            reason = "is for dense decoders like Llama, Qwen and Gemma, and this model is another one"
            raise WeightsError(f"names={names!r} {reason}", "names", given=names)
        self._seen: set[str] = set()
        self._tied: dict[str, Any] = {}
        self._held: dict[str, Piece] = {}
        self._board = _Board(self._names)

    @property
    def _names(self) -> Candidate:
        return self._candidates[0]

    def check(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Check all arrays of a tree, and choose the names that fit them."""
        rows = [self._row(name, array) for name, array in pairs]
        tensors = {tensor for row in rows if row is not None for tensor in row.tensors}
        for spec in self._names.specs.values():
            self._require({source.name for source in spec.sources} - tensors, spec)
        del self._candidates[1:]
        self._seen.clear()

    def read(self, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[Path, Any]]:
        """Yield each parameter when its last array has come."""
        for name, array in pairs:
            if (row := self._row(name, array)) is None:
                continue
            if self._board.candidate is not self._names:
                self._board = _Board(self._names, self._held, self._board.done)
            for index, tensor in enumerate(row.tensors):
                self._require_tie(tensor, array)
                if tensor in self._board.users:
                    self._held[tensor] = Piece(array, row.view, index)
                yield from (self._make(path) for path in self._board.arrived(tensor) if self._is_settled(path))
        for path, missing in list(self._board.waiting.items()):
            self._require(missing, self._names.specs[path])
            if not missing:
                yield self._make(path)

    def _make(self, path: Path) -> tuple[Path, Any]:
        spec = self._names.specs[path]
        array = fused(spec, [self._held[source.name] for source in spec.sources], dtype_of(spec, np.dtype(self._dtype)))
        for tensor in self._board.made(path):
            del self._held[tensor]
        return path, array

    def _is_settled(self, path: Path) -> bool:
        """Return whether all names that are still possible make a parameter of the same tensors."""
        return all(other.specs.get(path) == self._names.specs[path] for other in self._candidates[1:])

    def _row(self, name: str, array: Any) -> Row | None:
        """Return the row of an array, and keep the candidates that have it; None: the model does not use the array."""
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{quoted(name)} is a {type(array).__name__}, and must be an array")
        known = [(each, row) for each in self._candidates if (row := each.row(name)) is not None]
        if not known:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._ignored):
                return None
            raise WeightsError(
                f"the model has no array {quoted(name)}{self._under(self._names)}", name, given=array.shape
            )
        shape = tuple(array.shape)
        fitting = [(each, row) for each, row in known if row.fits(shape)]
        if not fitting:
            expected = known[0][1].shape
            raise WeightsError(
                f"{quoted(name)} is {shape_text(shape)} and must be {shape_text(expected)}", name, expected, shape
            )
        self._candidates, row = [each for each, _ in fitting], fitting[0][1]
        self._require_new(name, array)
        self._require_dtype(name, array, self._names.dtypes.get(row.tensors[0], self._dtype))
        return row

    def _under(self, candidate: Candidate) -> str:
        return f" under the names of {candidate.names!r}" if len({each.names for each in self._candidates}) == 1 else ""

    def _require_new(self, name: str, array: Any) -> None:
        if name in self._seen:
            raise WeightsError(f"{quoted(name)} is given twice", name)
        self._seen.add(name)
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
            raise WeightsError(f"{quoted(name)} was deleted: a program that it was donated to has overwritten it", name)

    def _require_dtype(self, name: str, array: Any, expected: str) -> None:
        given = np.dtype(array.dtype)
        if given.name == expected:
            return
        floats = all(jnp.issubdtype(kind, jnp.floating) for kind in (given, np.dtype(expected)))
        if not (self._cast and floats):
            advice = ": cast=True converts it" if floats else ""
            raise WeightsError(
                f"{quoted(name)} is {given.name} and must be {expected}{advice}", name, expected, given.name
            )

    def _require(self, missing: Collection[str], spec: ParamSpec) -> None:
        """Require the tensors of a parameter, or none of them if the weights may be partial."""
        if not missing or (self._partial and len(missing) == len({source.name for source in spec.sources})):
            return
        tensor = next(source.name for source in spec.sources if source.name in missing)
        name, shape = self._names.named(tensor)
        raise WeightsError(f"the weights lack {quoted(name)}, which must be {shape_text(shape)}", name, shape)

    def _require_tie(self, tensor: str, array: Any) -> None:
        """Require that the head of a tied model equals the embedding table."""
        for head, table in self._names.ties.items():
            if tensor not in (head, table):
                continue
            self._tied[tensor] = array
            if len(self._tied) == 2 and not _same(*self._tied.values()):
                reason = f"the model ties it to {quoted(table)}, and the two differ"
                raise WeightsError(f"{quoted(head)} has no place: {reason}", head)


def _same(one: Any, other: Any) -> bool:
    return one is other or bool((one == other).all())
