"""Buckets: the compiled size for each prompt chunk, and chunks that share a program. No jax."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """A chunk of ``length`` prompt tokens from position ``start``, run in the program of ``size`` rows."""

    start: int
    length: int
    size: int


def rule_size(start: int, end: int, sizes: Sequence[int]) -> int:
    """Return the size that the rule assigns to the token at ``start`` of a prompt whose prefill ends before ``end``.

    The prompt is cut at multiples of the largest size, and a tail runs in the smallest size that holds it. So the rule
    depends on this prompt only, never on the rest of the step or on the cache.
    """
    cut = start - start % sizes[-1]
    return sizes[bisect.bisect_left(sizes, min(end - cut, sizes[-1]))]


def next_chunk(
    start: int,
    end: int,
    sizes: Sequence[int],
    classes: Mapping[int, int],
    *,
    largest_only: bool = False,
    whole: Sequence[tuple[int, int]] = (),
) -> Chunk:
    """Return the chunk from ``start`` to the next cut, in the smallest program bitwise equivalent to `rule_size`'s.

    Args:
        start: tokens that are computed or cached already; within a chunk of the rule only after a cache hit.
        classes: sizes with equal numbers are bitwise equivalent programs (see `jaxinfer.engine.execution.probe`).
        largest_only: the request wants log probabilities of its prompt, for which there is one program.
        whole: ranges before ``end`` that no chunk splits, each of at most the largest size: where a cut is in one, it
            moves to the beginning of the range, and the next one to its end.
    """
    stop, due_from = start + min(end - start, sizes[-1] - start % sizes[-1]), start
    for first, last in whole:
        if first // sizes[-1] == (last - 1) // sizes[-1]:
            continue
        if first <= start < last:  # after a cache hit within the range, too
            stop, due_from = last, first
        elif first < stop < last:
            stop = first
    length = stop - start
    if largest_only or start + length < end:
        return Chunk(start, length, sizes[-1])  # so that sizes never grow along a prompt: `group_chunks` relies on it
    due = classes[rule_size(due_from, end, sizes)]
    return Chunk(start, length, next(size for size in sizes if size >= length and classes[size] == due))


def page_code(page: int, page_size: int, end: int, sizes: Sequence[int], classes: Mapping[int, int]) -> int:
    """Return the code of the programs that compute the tokens of a page: equal codes give bitwise identical pages.
    ``split`` of the tokens run in prefill programs of one class, the others as decode rows."""
    first = page * page_size
    split = min(max(end - first, 0), page_size)
    return classes[rule_size(first, end, sizes)] * (page_size + 1) + split if split else 0


def group_chunks(sizes: Sequence[int], widths: Mapping[int, int]) -> Iterator[list[int]]:
    """Yield groups of chunks (by index) that run together, in the order of their launch.

    Args:
        sizes: sizes of all chunks of a step; those of one prompt in order, so none is larger than the one before.
        widths: chunks that a wide program of a size takes. It is used where more than half of it is filled.
    """
    for size in sorted(set(sizes), reverse=True):
        same = [index for index, other in enumerate(sizes) if other == size]
        while same:
            width = widths.get(size, 1)
            taken = min(width, len(same)) if 2 * len(same) > width else 1
            yield same[:taken]
            same = same[taken:]
