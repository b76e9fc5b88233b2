"""Programs of lanes: one program on several devices, each of which has arrays of its own.

A lane is a device that serves sequences of its own and shares with the others what is dealt out among them, the experts
of a mixture. What the lanes have is one array: their own ones, one after another along the first axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_OWN = PartitionSpec("lane")


def lane_sharding(mesh: Mesh) -> NamedSharding:
    """Where an array of all lanes lies: each has its own part of the first axis."""
    return NamedSharding(mesh, _OWN)


def over_lanes(function: Callable[..., Any], arguments: tuple[Any, ...], shared: int = 0) -> Callable[..., Any]:
    """One lane's function as that of all lanes, for the mesh that it is traced for.

    Every array that it takes or gives is that of all lanes, and a number is an array with one for each.

    Args:
        arguments: what one lane's is called with, as `jax.ShapeDtypeStruct` with shardings.
        shared: so many of them, the first ones, are the lanes' together, and lie as they say: parameters.
    """
    numbers = [
        jax.tree.map(lambda x, own=place >= shared: own and x.ndim == 0, tree) for place, tree in enumerate(arguments)
    ]
    specs = [
        jax.tree.map(lambda x, own=place >= shared: _OWN if own else x.sharding.spec, tree)
        for place, tree in enumerate(arguments)
    ]

    @functools.wraps(function)
    def own(*given: Any) -> Any:
        return function(*jax.tree.map(lambda x, number: x[0] if number else x, list(given), numbers))

    return jax.shard_map(own, in_specs=tuple(specs), out_specs=_OWN, check_vma=False)


def of_lanes(arguments: tuple[Any, ...], mesh: Mesh, shared: int = 0) -> tuple[Any, ...]:
    """The arguments of `over_lanes`' function, from those of one lane's."""
    lanes, sharding = mesh.shape["lane"], lane_sharding(mesh)

    def together(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (lanes * x.shape[0], *x.shape[1:]) if x.ndim else (lanes,)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    return (*arguments[:shared], *jax.tree.map(together, arguments[shared:]))


def joined(trees: Sequence[Any]) -> Any:
    """Trees of the lanes' arrays on the host as one of all lanes."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *trees)
