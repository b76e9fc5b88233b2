"""Stand-ins for packages that the engine imports, so that gpu_check runs with only JAX, Flax and numpy installed.

Annotations (jaxtyping) are strings in this project; the grammar compiler (llguidance) and the encoder of its helpers'
messages (msgspec) are called only for requests that have a grammar.
``python -m jaxinfer.gpu_check.standins MODULE ...`` is ``python -m MODULE ...`` with stand-ins.
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

PACKAGES = ("jaxtyping", "llguidance", "msgspec")


class _Absent:
    """A stand-in for any name of a missing package: it only has to exist, and at most to be called."""

    def __init__(self, *arguments: object, **named: object) -> None:
        """Ignore all arguments."""

    def __init_subclass__(cls, **named: object) -> None:
        """Ignore the options of a base class."""

    def __class_getitem__(cls, item: object) -> Any:
        return Any


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of some packages, and all their submodules, as modules in which every name exists."""

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
        """Execute nothing: the module is empty."""


def provide() -> None:
    """Install a stand-in for each package that is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _StandIns(missing))


if __name__ == "__main__":
    provide()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
