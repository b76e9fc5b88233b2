"""Module names in an adapter file, which follow the model it was trained on and can differ from those of this model.

The adapter may have been trained on a text model or on a wrapper around it (`jaxinfer.formats.multimodal`), with
transformers before or after 4.52, with or without a head; rules of its configuration use the names that its writer saw.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable

from jaxinfer.formats.multimodal import INNER_SPELLINGS, OTHERS

Prefixes = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Naming:
    """A spelling of module names: pairs of prefixes that differ, the model's prefix first.

    Attributes:
        prefixes: pairs of (model's prefix, file's prefix).
    """

    prefixes: Prefixes = ()

    def own(self, name: str) -> str:
        """Return the model's name of a module named in the file."""
        return _changed(name, tuple((theirs, own) for own, theirs in self.prefixes))

    def theirs(self, name: str) -> str:
        """Return the file's name of a module of the model."""
        return _changed(name, self.prefixes)


def find_naming(found: Iterable[str], known: Collection[str]) -> Naming:
    """Return the spelling under which most names of a file match the model.

    Args:
        found: module names in the file.
        known: module names of the model.
    """
    names, kept = list(found), {part for name in known for part in (name, name.rpartition(".")[0])}
    ((first, _),) = Counter(f"{name.partition('.')[0]}." for name in known).most_common(1) or [("", 0)]
    spellings = [Naming(), *map(Naming, INNER_SPELLINGS), Naming(((first, ""),)), Naming(((first, "language_model."),))]
    return max(spellings, key=lambda one: sum(one.own(_unwrapped(name)) in kept for name in names))


def is_of_others(name: str) -> bool:
    """Return whether a module belongs to a wrapper outside of its text model: a tower or its projector."""
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
