"""gpu_check runs where only JAX, Flax and numpy are installed: what the engine imports besides gets a stand-in.

Annotations (jaxtyping) are strings in this project, and what compiles grammars (llguidance) is asked only for requests
that have one. ``python -m jaxinfer.gpu_check.standins MODULE ...`` is ``python -m MODULE ...`` with them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = ("jaxtyping", "llguidance")


class _Absent:
    """Anything of a package that is not there: it only has to exist, and to be called at most."""

    def __init__(self, *arguments: object, **named: object) -> None:
        """Nothing is kept."""

    def __class_getitem__(cls, item: object) -> Any:
        return Any


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds some packages, and all that is in them, as modules in which every name exists."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = lambda name: _Absent
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


def provide() -> None:
    """Put a stand-in in the place of each package that is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _StandIns(missing))


if __name__ == "__main__":
    provide()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
