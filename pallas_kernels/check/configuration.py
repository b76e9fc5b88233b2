"""Configurations that `python -m pallas_kernels.check` compiles: shipped shapes by op, in ``check/configurations``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

HOPPER, H200, AMPERE, ADA = "sm_90a", "sm_90a-h200", "sm_80", "sm_89"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A kernel at one shape, as `jax.jit` compiles it.

    Attributes:
        op: ``paged_attention.decode`` for example; ``--op`` selects by prefix.
        name: distinguishes the shapes of an op, ``page64-dim128-group4-bf16`` for example.
        build: returns the function and the shapes of its arguments (trees of `jax.ShapeDtypeStruct`).
        targets: targets it ships for. An H200 runs an H100's machine code; the choice of its heuristics may differ.
        donated: indices of the donated arguments.
    """

    op: str
    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    targets: tuple[str, ...] = (HOPPER,)
    donated: tuple[int, ...] = ()


def shaped(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """Return an argument that has only a shape and a dtype."""
    return jax.ShapeDtypeStruct(shape, dtype)
