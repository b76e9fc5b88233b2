"""A parameter made of the tensors that its spec names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.types import ParamSpec, Source
from jaxinfer.weights.buffers import copy_blocks, new_buffer
from jaxinfer.weights.trainers.rows import View
from jaxinfer.weights.tree import as_placed


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor: an array of a trainer, or the ``index``-th tensor of a view of it."""

    array: Any
    view: View | None
    index: int


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """What makes a parameter of arrays, without their names: layers of one shape share a compiled program."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[tuple[View | None, Source], ...]

    def placed(self, arrays: Sequence[Any], indices: Sequence[Any]) -> Iterator[tuple[tuple[slice | int, ...], Any]]:
        """Yield the parts of the parameter, each with its position."""
        for (view, source), array, index in zip(self.parts, arrays, indices, strict=True):
            tensor = array if view is None else view.tensor(array, index)
            yield source.where, as_placed(tensor, source)


def fused(spec: ParamSpec, pieces: Sequence[Piece], dtype: np.dtype[Any]) -> Any:
    """Return a parameter from the tensors of its sources, in their order.

    Returns:
        The array that was given, if it is the parameter; otherwise a numpy array if all arrays are on the host or on
        CPUs, and a JAX array on the devices of the arrays if not. On devices the first parameter of each shape compiles
        a program.
    """
    arrays, indices = tuple(piece.array for piece in pieces), tuple(piece.index for piece in pieces)
    parts = zip(pieces, spec.sources, strict=True)
    recipe = _Recipe(
        spec.shape, dtype, tuple((piece.view, dataclasses.replace(source, name="")) for piece, source in parts)
    )
    if recipe.parts == ((None, Source("", spec.shape)),) and arrays[0].dtype == dtype:
        return arrays[0]
    return _on_host(recipe, arrays, indices) if all(map(is_host, arrays)) else _on_devices(recipe, arrays, indices)


def is_host(array: Any) -> bool:
    """Return whether numpy reads an array without a transfer from a device."""
    if not isinstance(array, jax.Array):
        return True
    return array.is_fully_addressable and all(device.platform == "cpu" for device in array.devices())


def _on_host(recipe: _Recipe, arrays: Sequence[Any], indices: Sequence[int]) -> np.ndarray:
    buffer = new_buffer(recipe.shape, recipe.dtype)
    for where, part in recipe.placed([np.asarray(array) for array in arrays], indices):
        copy_blocks(buffer[(*where, ...)], part)
    return buffer


@functools.partial(jax.jit, static_argnums=0)
def _on_devices(recipe: _Recipe, arrays: Sequence[Any], indices: Sequence[Any]) -> jax.Array:
    whole: Any = None
    for where, part in recipe.placed(arrays, indices):
        if part.shape == recipe.shape:
            return part.astype(recipe.dtype)
        whole = jnp.zeros(recipe.shape, recipe.dtype) if whole is None else whole
        whole = whole.at[where].set(part.astype(recipe.dtype))
    return whole
