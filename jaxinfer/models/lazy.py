"""A mapping of names to constants of modules, which are imported when they are looked up."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping


class Lazy[T](Mapping[str, T]):
    """A mapping whose values are imported when they are looked up: rows are ``module:CONSTANT`` of a package."""

    def __init__(self, package: str, rows: Mapping[str, str]) -> None:
        self._package, self._rows = package, rows

    def __getitem__(self, name: str) -> T:
        module, _, constant = self._rows[name].partition(":")
        found: T = getattr(importlib.import_module(f"{self._package}.{module}"), constant)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows
