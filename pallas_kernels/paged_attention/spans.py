"""The spans of keys that the queries of a row see, in a kernel's key blocks and splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

# For decode and prefill on every GPU: sums restart at its multiples, so that a position is bitwise identical in both.
KEYS_PER_SPLIT = 512


class Span(NamedTuple):
    """The keys that a row's queries may see. Traced scalars in the kernel, arrays of all rows in a plan."""

    low: Any  # first key that any of the row's queries sees
    high: Any  # one past the last
    first_block: Any
    end_block: Any
    first_split: Any
    last_split: Any  # a row that sees nothing has one split without blocks: it writes the zeros


def span(start: Any, length: Any, *, block_keys: int, keys_per_split: int, window: int | None) -> Span:
    """Return the span of a row of ``length`` keys with its first query at position ``start``."""
    low = jnp.zeros_like(length) if window is None else jnp.clip(start - (window - 1), 0, jnp.maximum(length - 1, 0))
    first_block = _divide(low, block_keys)
    end_block = _divide(length + (block_keys - 1), block_keys)
    blocks_per_split = keys_per_split // block_keys
    first_split = _divide(first_block, blocks_per_split)
    last_split = jnp.maximum(_divide(jnp.maximum(end_block - 1, 0), blocks_per_split), first_split)
    return Span(low, length, first_block, end_block, first_split, last_split)


def _divide(a: Any, b: Any) -> Any:
    """Divide integers >= 0, rounding down."""
    return lax.div(a, jnp.broadcast_to(jnp.asarray(b, jnp.int32), jnp.shape(a)))
