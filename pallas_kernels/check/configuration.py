"""Configurations that `python -m pallas_kernels.check` compiles: shipped shapes by op, in ``check/configurations``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

HOPPER, H200, AMPERE, ADA = "sm_90a", "sm_90a-h200", "sm_80", "sm_89"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One kernel at one shape, as `jax.jit` is to compile it.

    Attributes:
        op: ``paged_attention.decode`` for example; what ``--op`` selects by prefix.
        name: tells the shapes of an op apart, ``page64-dim128-group4-bf16`` for example.
        build: gives the function and the shapes of its arguments (trees of `jax.ShapeDtypeStruct`).
        targets: the machine codes it ships for. Those of an H200 are an H100's; what its heuristics choose may differ.
        donated: positions of the arguments whose memory the result takes over.
    """

    op: str
    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    targets: tuple[str, ...] = (HOPPER,)
    donated: tuple[int, ...] = ()


def shaped(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """An argument of which only shape and dtype matter."""
    return jax.ShapeDtypeStruct(shape, dtype)
