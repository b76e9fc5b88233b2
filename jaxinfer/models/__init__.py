"""Models: configuration, parameters and forward pass of every family, as pure functions.

Families are in `jaxinfer.models.families`, draft heads in `jaxinfer.models.heads`. Their former names, such as
``jaxinfer.models.llama``, are aliases of these modules.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _FormerNames(MetaPathFinder, Loader):
    """Import of a family's module by its former name, directly in this package."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__ or name in ("families", "heads"):
            return None
        places = (f"{__name__}.families.{name}", f"{__name__}.heads.{name}")
        found = next((place for place in places if importlib.util.find_spec(place) is not None), None)
        return None if found is None else ModuleSpec(fullname, self, origin=found)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # which the import system has replaced


sys.meta_path.append(_FormerNames())  # after all others: a module of that name comes first
