"""Arrays to be written to a converted folder: their chunk shapes and the source of their values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxinfer.parallel.mesh import RULES
from jaxinfer.types import ParamSpec, ParamTree, walk_specs
from jaxinfer.weights.native.manifest import DTYPES, NIBBLES, StoredArray, array_name
from jaxinfer.weights.tree import leaf_of

# Most chunks along a sharded dimension: on up to as many devices, each reads only its own chunks.
_PIECES = 8
_SMALLEST_CHUNK = 1 << 20  # bytes


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array to be written.

    Attributes:
        axes: the logical axis of each dimension (see `ParamSpec`).
        read: returns the array; called when it is written.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[str | None, ...]
    read: Callable[[], Any]

    @property
    def stored(self) -> StoredArray:
        """Description of the array as it will be stored, without checksums.

        Raises:
            ValueError: its dtype cannot be stored.
        """
        if self.dtype.name not in DTYPES:
            raise ValueError(f"arrays of {self.dtype.name} cannot be stored")
        whole = StoredArray(self.shape, self.dtype.name, ())
        return dataclasses.replace(whole, chunk=chunk_of(whole.stored_shape, self.axes, whole.stored_dtype.itemsize))

    def value(self, array: StoredArray) -> np.ndarray:
        """Return the array in its stored encoding.

        Raises:
            ValueError: its shape or dtype is not the declared one.
        """
        value = np.asarray(self.read())
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ValueError(f"an array of {self.dtype} {self.shape} turned out to be {value.dtype} {value.shape}")
        if array.dtype not in NIBBLES:
            return value
        halves = value.astype(np.int8).view(np.uint8) & 15
        return halves[..., ::2] | halves[..., 1::2] << 4 if array.paired else halves


def chunk_of(shape: Sequence[int], axes: Sequence[str | None], itemsize: int) -> tuple[int, ...]:
    """Return the chunk shape of an array: sharded dimensions are halved as long as chunks stay large."""
    chunk, going = list(shape), True
    while going:
        going = False
        for dimension, axis in enumerate(axes):
            pieces = 2 * shape[dimension] // chunk[dimension]
            large = math.prod(chunk) * itemsize >= 2 * _SMALLEST_CHUNK
            if axis in RULES and large and pieces <= _PIECES and chunk[dimension] % 2 == 0:
                chunk[dimension] //= 2
                going = True
    return tuple(chunk)


def leaves_of(specs: ParamTree, params: Any) -> dict[str, Leaf]:
    """Return the arrays of parameters by name, see `array_name`.

    Raises:
        ValueError: a parameter is missing, has another shape than its spec, or is not entirely in this process.
    """
    return {array_name(path): _leaf(path, spec, params) for path, spec in walk_specs(specs)}


def _leaf(path: tuple[str, ...], spec: ParamSpec, params: Any) -> Leaf:
    value = leaf_of(params, path, spec)
    if not getattr(value, "is_fully_addressable", True):
        raise ValueError(f"{'/'.join(path)} is spread over several processes, of which none has all of it")
    return Leaf(spec.shape, np.dtype(value.dtype), spec.axes, lambda: value)
