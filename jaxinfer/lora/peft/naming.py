"""Names of modules in an adapter's file: those of the model that it was trained on, which need not be the model's here.

It may have been trained on a text model or on a wrapper around it (`jaxinfer.wrapped`), by transformers of before or
after 4.52, and with or without a head; a rule of its configuration is about the names that its writer saw.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable

from jaxinfer.wrapped import INNER_SPELLINGS, OTHERS

Prefixes = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Naming:
    """One spelling: the beginnings of names that differ, the model's own first.

    Attributes:
        prefixes: (own, the file's).
    """

    prefixes: Prefixes = ()

    def own(self, name: str) -> str:
        """The model's own name of a module that the file calls so."""
        return _changed(name, tuple((theirs, own) for own, theirs in self.prefixes))

    def theirs(self, name: str) -> str:
        """The file's name of a module of the model."""
        return _changed(name, self.prefixes)


def find_naming(found: Iterable[str], known: Collection[str]) -> Naming:
    """The spelling by which most names of a file are a model's.

    Args:
        found: modules, as the file calls them.
        known: those of the model.
    """
    names, kept = list(found), {part for name in known for part in (name, name.rpartition(".")[0])}
    ((first, _),) = Counter(f"{name.partition('.')[0]}." for name in known).most_common(1) or [("", 0)]
    spellings = [Naming(), *map(Naming, INNER_SPELLINGS), Naming(((first, ""),)), Naming(((first, "language_model."),))]
    return max(spellings, key=lambda one: sum(one.own(_unwrapped(name)) in kept for name in names))


def is_of_others(name: str) -> bool:
    """Whether a module belongs to what a wrapper has besides its text model: a tower, or what leads from one."""
    return name.removeprefix("model.").partition(".")[0] in OTHERS


def _unwrapped(name: str) -> str:
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return name


def _changed(name: str, prefixes: Prefixes) -> str:
    for begin, other in prefixes:
        if f"{name}.".startswith(begin):
            return f"{other}{f'{name}.'.removeprefix(begin)}".removesuffix(".")
    return name
