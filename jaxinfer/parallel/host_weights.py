"""Weights of layers in host memory, copied to the device a layer ahead of their use, in a program."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


class LayerWeights:
    """The weights of layers in the order of their use, on the device.

    The copy of a layer's weights begins when the layer with such weights before it begins (those of the first two with
    the program): they overlap, and the device holds two of these layers at most. The arithmetic is that without copies.

    Args:
        layers: a tree of arrays for each layer, of which some may be in host memory.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._waiting = collections.deque(place for place, layer in enumerate(layers) if _has_host_arrays(layer))
        self._ahead = _fetched(layers[self._waiting[0]]) if self._waiting else None
        self._first = True

    def take(self, place: int, entering: Any) -> Any:
        """Return the weights of the layer at ``place``, and begin to copy those of a later one.

        Args:
            entering: arrays that the layer reads, of which the copy waits.
        """
        if not self._waiting or self._waiting[0] != place:
            return self._layers[place]
        found, _ = self._ahead, self._waiting.popleft()
        if self._waiting:
            self._ahead = _fetched(self._layers[self._waiting[0]], None if self._first else entering)
        self._first = False
        return found


def _has_host_arrays(tree: Any) -> bool:
    return any(map(_on_host, jax.tree.leaves(tree)))


def _on_host(array: Any) -> bool:
    return jax.typeof(array).memory_space is jax.memory.Space.Host


def _fetched(tree: Any, after: Any = None) -> Any:
    """Copy the arrays of a tree that are in host memory to the device, once ``after`` has been computed."""
    leaves, structure = jax.tree.flatten(tree)
    held = [leaf for leaf in leaves if _on_host(leaf)]
    if after is not None:  # else XLA copies all layers at once
        held, leaves = _once(after, held, leaves)
    copies = iter([jax.device_put(leaf, jax.memory.Space.Device) for leaf in held])
    return jax.tree.unflatten(structure, [next(copies) if _on_host(leaf) else leaf for leaf in leaves])


def _once(after: Any, held: list[Any], leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the arrays ``held``, not before ``after`` has been computed, and all the leaves.

    XLA drops what a barrier takes and nothing reads. So one number of ``after`` is an alternative to a small array of
    the layer, which is never taken: reading ``after`` itself behind the barrier would change its rounding.
    """
    number = jax.tree.leaves(after)[0].reshape(-1)[0]
    held, number, taken = lax.optimization_barrier((held, number, jnp.bool_(False)))
    small = min((leaf for leaf in leaves if not _on_host(leaf)), key=lambda leaf: leaf.size)
    other = jnp.where(taken, number.astype(small.dtype), small)
    return held, [other if leaf is small else leaf for leaf in leaves]
