"""Candidates: the names that the arrays of a trainer may have, for one model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from jaxinfer.formats.multimodal import spellings
from jaxinfer.types import EMBEDDING, HEAD, ParamSpec, ParamTree, Source, walk_specs
from jaxinfer.weights.moe_stacks import stacked_forms
from jaxinfer.weights.trainers import levanter, maxtext, tunix
from jaxinfer.weights.trainers.dense import Table, dense_of
from jaxinfer.weights.trainers.rows import Row
from jaxinfer.weights.tree import Path, with_names

OWN = "own"
NAMES = (OWN, "hf", "tunix", "maxtext", "levanter")
"""Conventions of names: the model's own paths, Hugging Face's tensors, and those of trainers in JAX."""

_TABLES = {"tunix": tunix.tables, "maxtext": maxtext.tables, "levanter": levanter.tables}


@runtime_checkable
class Specified(Protocol):
    """A model as this package needs it: a `jaxinfer.models.model.Model`."""

    @property
    def specs(self) -> ParamTree: ...

    @property
    def declared_specs(self) -> ParamTree: ...

    @property
    def config(self) -> Any: ...

    @property
    def family(self) -> Any: ...

    @property
    def params(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A set of names.

    Attributes:
        names: its convention, one of `NAMES`.
        specs: the parameters by path, whose sources are the tensors of ``rows``.
        rows: the arrays by name.
        ties: tensors that hold no parameter of their own and must equal another one, by name.
        plain: returns the key in ``rows`` of a name.
    """

    names: str
    specs: Mapping[Path, ParamSpec]
    rows: Table
    ties: Mapping[str, str] = MappingProxyType({})
    plain: Callable[[str], str] = str

    def row(self, name: str) -> Row | None:
        """Return the row of an array; None: it has none."""
        return self.rows.get(self.plain(name))

    def named(self, tensor: str) -> tuple[str, tuple[int, ...]]:
        """Return the name and the shape of the array that holds a tensor."""
        return next((name, row.shape) for name, row in self.rows.items() if tensor in row.tensors)

    @functools.cached_property
    def dtypes(self) -> Mapping[str, str]:
        """Dtypes of the tensors that have not that of the model."""
        return {source.name: spec.dtype for spec in self.specs.values() for source in spec.sources if spec.dtype}


def candidates(model: Specified, names: str | None) -> Iterator[Candidate]:
    """Yield the candidates of a convention, or of all (None)."""
    plain = _plain(model)
    if names in (None, OWN):
        yield _own(model.specs)
        if plain is not model.specs:
            yield _own(plain)
    specs = dict(walk_specs(plain))
    if names in (None, "hf"):
        yield from _of_tensors(model, plain)
    dense = dense_of(specs, model.config)
    for kind, tables in _TABLES.items():
        if names in (None, kind) and dense is not None:
            to_key = maxtext.plain_name if kind == "maxtext" else str
            yield from (Candidate(kind, specs, table, plain=to_key) for table in tables(dense) if table)


def _plain(model: Specified) -> ParamTree:
    """Return the specs of the parameters that are arrays: not quantised, and not in a layout for kernels."""
    return model.declared_specs if any(grouped(model.specs)) else model.specs


def grouped(specs: ParamTree, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of the parameters that consist of several arrays or of one in a layout for kernels."""
    for key, node in specs.items():
        if isinstance(node, Mapping):
            yield from grouped(node, (*path, key))
        elif not isinstance(node, ParamSpec):
            yield (*path, key)


def _own(specs: ParamTree) -> Candidate:
    named = {path: _as_itself(".".join(path), spec) for path, spec in walk_specs(specs)}
    return Candidate(OWN, named, _rows(named))


def _as_itself(name: str, spec: ParamSpec) -> ParamSpec:
    return dataclasses.replace(spec, sources=(Source(name, spec.shape),))


def _rows(specs: Mapping[Path, ParamSpec]) -> Table:
    sources = (source for spec in specs.values() for source in spec.sources)
    return {source.name: Row((source.name,), source.shape) for source in sources}


def _of_tensors(model: Specified, specs: ParamTree) -> Iterator[Candidate]:
    """Yield the candidates of Hugging Face's names: with each spelling of a wrapper, and each layout of experts."""
    head = _tied_head(model)
    for spell in spellings(model.family.prefix, wrapped=True):
        for form in stacked_forms(with_names(specs, spell)):
            named = dict(walk_specs(form))
            rows, ties = _rows(named), {}
            if head is not None:
                table, tensor = named[EMBEDDING].sources[0], spell(head)
                rows[tensor], ties = Row((tensor,), table.shape), {tensor: table.name}
            yield Candidate("hf", named, rows, ties)


def _tied_head(model: Specified) -> str | None:
    """Return the name of the head that a checkpoint of a tied model may hold; None: the model is not tied."""
    if not getattr(model.config, "tied", False):
        return None
    untied = dict(walk_specs(model.family.param_specs(dataclasses.replace(model.config, tied=False))))
    return untied[HEAD].sources[0].name if HEAD in untied and untied[HEAD].sources else None
