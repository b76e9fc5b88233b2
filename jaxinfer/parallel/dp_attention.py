"""DP attention programs: one program on several ranks, each of which has its own arrays.

A rank is a device that serves its own sequences and shares the experts of a mixture with the other ranks. An array of
all ranks is the concatenation of the arrays of the ranks along the first axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_PER_RANK = PartitionSpec("dp_attn")


def rank_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array of all ranks, along the first axis."""
    return NamedSharding(mesh, _PER_RANK)


def over_ranks_sharding(sharding: NamedSharding) -> NamedSharding:
    """Return `rank_sharding` with the memory kind of one rank's array."""
    return NamedSharding(sharding.mesh, _PER_RANK, memory_kind=sharding.memory_kind)


def over_ranks(function: Callable[..., Any], arguments: tuple[Any, ...], shared: int = 0) -> Callable[..., Any]:
    """Lift a function of one rank to all ranks, for the mesh that it is traced for.

    Every array that it takes or returns is that of all ranks, and a scalar is an array with one element per rank.

    Args:
        arguments: arguments of one rank's function, as `jax.ShapeDtypeStruct` with shardings.
        shared: number of leading arguments that all ranks share, in their own sharding: parameters.
    """
    numbers = [
        jax.tree.map(lambda x, ranked=place >= shared: ranked and x.ndim == 0, tree)
        for place, tree in enumerate(arguments)
    ]
    specs = [
        jax.tree.map(lambda x, ranked=place >= shared: _PER_RANK if ranked else x.sharding.spec, tree)
        for place, tree in enumerate(arguments)
    ]

    @functools.wraps(function)
    def of_one(*operands: Any) -> Any:
        return function(*jax.tree.map(lambda x, number: x[0] if number else x, list(operands), numbers))

    return jax.shard_map(of_one, in_specs=tuple(specs), out_specs=_PER_RANK, check_vma=False)


def of_ranks(arguments: tuple[Any, ...], mesh: Mesh, shared: int = 0) -> tuple[Any, ...]:
    """Return the arguments of the `over_ranks` function, from those of one rank's function."""
    ranks = mesh.shape["dp_attn"]

    def together(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (ranks * x.shape[0], *x.shape[1:]) if x.ndim else (ranks,)
        sharding = rank_sharding(mesh) if x.sharding is None else over_ranks_sharding(x.sharding)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    return (*arguments[:shared], *jax.tree.map(together, arguments[shared:]))


def joined(trees: Sequence[Any]) -> Any:
    """Concatenate trees of the ranks' host arrays to one tree of all ranks."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *trees)
