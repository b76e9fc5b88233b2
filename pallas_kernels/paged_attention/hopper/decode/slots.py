"""Slots of device memory for partial sums: those of one split, or of a head's splits so far.

A head whose splits lie in several thread blocks (a *cut* head) needs a slot for each split. For any lengths there are
fewer cut heads than blocks. Proof: units are in order and a block's are consecutive, so of the heads that begin in a
block only the last can be cut; and none that begins in the last block is, as no block follows. So the block in which a
cut head begins identifies it, and is one of the first ``blocks - 1``.

A head that is not cut needs memory only while its block works on it, and only where registers do not hold its sums
(`Shape.parks`). Two slots a block are written in turn: a slow warp may still read one while another writes.

Where a slot for each split of each head takes no more than that, heads have their own.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.paged_attention.hopper.decode.types import Shape

_IN_TURN = 2


def slots(shape: Shape) -> int:
    """The number of slots of a launch, whatever its rows' lengths; an array has at least one."""
    return max(min(_by_head(shape), _by_block(shape)), 1)


def cut_slot(shape: Shape, head: Any, split: Any, began: Any) -> Any:
    """The slot of a cut head's split.

    Args:
        head: ``row * kv_heads + head``.
        split: counted from the head's first one.
        began: the thread block that has the head's first split.
    """
    return (head if _has_own(shape) else began) * shape.splits + split


def uncut_slot(shape: Shape, head: Any, split: Any, block: Any) -> Any:
    """The slot of an uncut head's sums up to this split (counted from its first), while ``block`` works on it."""
    turn = split & (_IN_TURN - 1)
    if _has_own(shape):
        return head * shape.splits + turn
    return (shape.tiles.blocks - 1) * shape.splits + block * _IN_TURN + turn


def _has_own(shape: Shape) -> bool:
    """Are there so few heads that a group of slots for each is the least?"""
    return _by_head(shape) <= _by_block(shape)


def _by_head(shape: Shape) -> int:
    return shape.rows * shape.kv_heads * shape.splits


def _by_block(shape: Shape) -> int:
    return (shape.tiles.blocks - 1) * shape.splits + (_IN_TURN * shape.tiles.blocks if shape.parks else 0)
