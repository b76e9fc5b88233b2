"""Which compiled size a piece of prompt runs in, and which pieces share a program. No jax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


def group_chunks(sizes: Sequence[int], lanes: Mapping[int, int]) -> Iterator[list[int]]:
    """Chunks (by index) that run together, in the order of their launch.

    Args:
        sizes: of all chunks of a step; those of one prompt in order, so none is larger than the one before.
        lanes: chunks that a wide program of a size takes. It is used where more than half of it is filled.
    """
    for size in sorted(set(sizes), reverse=True):
        same = [index for index, other in enumerate(sizes) if other == size]
        while same:
            width = lanes.get(size, 1)
            taken = min(width, len(same)) if 2 * len(same) > width else 1
            yield same[:taken]
            same = same[taken:]
