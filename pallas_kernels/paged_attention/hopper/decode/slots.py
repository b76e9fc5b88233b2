"""Slots of device memory for partial sums: those of one split, or of a head's splits so far.

A head with splits in several CTAs (a *cut* head) needs a slot for each split. For any lengths there are fewer cut heads
than CTAs. Proof: units are in order and a CTA's are consecutive, so of the heads that begin in a CTA only the last can
be cut; and none that begins in the last CTA is, as no CTA follows. So the CTA in which a cut head begins identifies it,
and is one of the first ``blocks - 1``.

A head that is not cut needs memory only while its CTA works on it, and only if registers do not hold its sums
(`Shape.parks`). Two slots per CTA are written in turn: a slow warp may still read one while another writes.

If a slot for each split of each head takes no more than that, heads have their own slots.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.paged_attention.hopper.decode.types import Shape

_IN_TURN = 2


def slots(shape: Shape) -> int:
    """Return the number of slots of a launch, independent of row lengths; an array has at least one."""
    return max(min(_by_head(shape), _by_block(shape)), 1)


def cut_slot(shape: Shape, head: Any, split: Any, began: Any) -> Any:
    """Return the slot of a cut head's split.

    Args:
        head: ``row * kv_heads + head``.
        split: counted from the head's first one.
        began: the CTA that has the head's first split.
    """
    return (head if _has_own(shape) else began) * shape.splits + split


def uncut_slot(shape: Shape, head: Any, split: Any, block: Any) -> Any:
    """Return the slot of an uncut head's sums up to a split (counted from its first), while ``block`` works on it."""
    turn = split & (_IN_TURN - 1)
    if _has_own(shape):
        return head * shape.splits + turn
    return (shape.tiles.blocks - 1) * shape.splits + block * _IN_TURN + turn


def _has_own(shape: Shape) -> bool:
    """Return whether a group of slots for each head takes the least memory, as there are few heads."""
    return _by_head(shape) <= _by_block(shape)


def _by_head(shape: Shape) -> int:
    return shape.rows * shape.kv_heads * shape.splits


def _by_block(shape: Shape) -> int:
    return (shape.tiles.blocks - 1) * shape.splits + (_IN_TURN * shape.tiles.blocks if shape.parks else 0)
