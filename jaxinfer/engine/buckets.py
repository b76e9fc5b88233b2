"""Which compiled size a piece of prompt runs in. No jax."""

from __future__ import annotations

from typing import NamedTuple


class Chunk(NamedTuple):
    """``length`` prompt tokens from position ``start``, run in the program of ``size`` rows."""

    start: int
    length: int
    size: int


def next_chunk(start: int, end: int, sizes: tuple[int, ...], *, largest_only: bool = False) -> Chunk:
    """The chunk that begins at ``start`` of a prompt whose prefill ends before ``end``.

    The rule looks at this prompt alone, never at what else is in the step: chunks begin at multiples of the largest
    size, and a tail runs in the smallest size that holds it. So a token's row count, and with it every bit of its
    result, does not depend on its neighbours.
    """
    length = min(end - start, sizes[-1])
    fitting = sizes[-1] if largest_only else next(size for size in sizes if size >= length)
    return Chunk(start, length, fitting)
