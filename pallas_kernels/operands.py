"""Operands of kernels: random and valid, as expensive as a model's (zeros draw less power).

`Draw` makes them from the shapes of a spec or of a recorded launch, on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels import bits

CACHE_BYTES = 128 << 20  # more than any GPU's cache so far: operands of this size come from memory
MOST_SETS = 16


class Case(NamedTuple):
    """Operands of a launch, and those of the XLA path for the slice of the result that ``select`` takes.

    ``plain``: None: ``operands``.
    """

    operands: tuple[Any, ...]
    options: Mapping[str, Any] = {}
    plain: tuple[Any, ...] | None = None
    select: Callable[[Any], Any] = lambda result: result


class Draw:
    """Random arrays of given shapes and dtypes, different at each call.

    Numbers are hashes of their indices: `jax.random` takes longer to compile than all trials. ``seed``: an integer
    array, so that a compiler cannot constant-fold the numbers.
    """

    def __init__(self, seed: Any) -> None:
        self._seed, self._calls = jnp.asarray(seed).astype(jnp.uint32), 0

    def _hashes(self, shape: tuple[int, ...]) -> Any:
        """Return 32 random bits each ("lowbias32" of Wellons, Prospecting for Hash Functions, 2018)."""
        self._calls += 1
        place = (
            jnp.arange(math.prod(shape), dtype=jnp.uint32) + np.uint32(self._calls * 0x9E3779B9 % 2**32) + self._seed
        )
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            place = (place ^ (place >> shift)) * np.uint32(factor)
        return (place ^ (place >> 16)).reshape(shape)

    def normal(self, like: Any, scale: float = 1.0, first: int | None = None) -> Any:
        """Draw bell-shaped numbers (the sum of two uniform ones) of variance 1; for integers, most of the range.

        ``first``: another first dimension. A float8 pool in bytes gets the bits of such numbers.
        """
        if like is None:
            return None
        kind, found = bits.meant(like.dtype), self._hashes(_shape(like, first))
        if jnp.issubdtype(kind, jnp.integer):
            most = int(jnp.iinfo(kind).max)
            return ((found % np.uint32(2 * most + 1)).astype(jnp.int32) - most).astype(kind)
        both = ((found >> 16) + (found & 0xFFFF)).astype(jnp.float32) / 65535 - 1
        return bits.held((both * (6**0.5 * scale)).astype(kind), like.dtype)

    def uniform(self, like: Any, least: float, most: float, first: int | None = None) -> Any:
        if like is None:
            return None
        found = self._hashes(_shape(like, first)).astype(jnp.float32) / 2.0**32
        return (least + (most - least) * found).astype(like.dtype)

    def integers(self, like: Any, least: int, most: int) -> Any:
        """Draw integers from ``least`` to ``most`` - 1."""
        return (self._hashes(like.shape) % np.uint32(most - least)).astype(jnp.int32) + least

    def distinct(self, like: Any, count: int) -> Any:
        """Return distinct numbers below ``count``: multiples of a number coprime to it."""
        factor = next(one for one in range(max(2, int(count * 0.618)), 2 * count + 3) if math.gcd(one, count) == 1)
        places = np.arange(math.prod(like.shape), dtype=np.int64) * factor % count
        return jnp.asarray(places.astype(np.int32).reshape(like.shape))

    def pool_scales(self, like: Any, pool: Any, first: int) -> Any:
        """Draw scales of an 8-bit pool, so that its dequantized numbers are about 1."""
        spread = 64.0 if jnp.issubdtype(bits.meant(pool.dtype), jnp.integer) else 1.0
        return self.uniform(like, 0.5 / spread, 1.5 / spread, first)


def _shape(like: Any, first: int | None) -> tuple[int, ...]:
    return tuple(like.shape) if first is None else (first, *like.shape[1:])


def filled(size: int, value: int) -> Int[Array, " size"]:
    return jnp.full((size,), value, jnp.int32)


def sets_beyond_cache(set_bytes: int) -> int:
    """Return how many operand sets of ``set_bytes`` bytes exceed the GPU's cache, 2 to `MOST_SETS`."""
    return max(2, min(MOST_SETS, math.ceil(CACHE_BYTES / set_bytes)))


def operand_sets(make: Callable[[Draw], Sequence[Any]], varied: int, count: int) -> list[tuple[Any, ...]]:
    """Return ``count`` operand sets that share all arrays but one.

    Args:
        make: draws the operands of a launch.
        varied: index of the operand that differs.
    """
    first = tuple(jax.jit(lambda seed: tuple(make(Draw(seed))))(0))
    redrawn = jax.jit(lambda seed: Draw(seed).normal(first[varied]))
    others = (redrawn(index) for index in range(1, count))
    return [first, *((*first[:varied], other, *first[varied + 1 :]) for other in others)]
