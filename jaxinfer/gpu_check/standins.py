"""gpu_check runs where only JAX, Flax and numpy are installed: jaxtyping, which the engine imports, gets a stand-in."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any


class _Shape:
    """Any of jaxtyping's types: annotations are strings in this project, so it only has to exist."""

    def __class_getitem__(cls, item: object) -> Any:
        return Any


def provide() -> None:
    """Put an empty jaxtyping in place if there is none."""
    if importlib.util.find_spec("jaxtyping") is None:
        module = types.ModuleType("jaxtyping")
        module.__dict__["__getattr__"] = lambda name: _Shape
        module.__dict__["__path__"] = []
        sys.modules["jaxtyping"] = module
