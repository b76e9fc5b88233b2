"""Rows of a decode step that are fed drafts: the sampler state that they see, and draft acceptance.

A slot has one row of its own, fed a known token, and draft rows after it, fed draft tokens for the following positions.
There may be several paths of draft rows: each but the first begins with a copy of the slot's own row. A draft is
accepted when the row before it samples the same token (Leviathan et al. 2023 with a draw that depends on seed and
position only), so a draft row must see the sampler state as if its draft were accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from jaxinfer.sampling.slots import SlotParams, SlotState


class DraftRows(NamedTuple):
    """Rows of a step that may hold drafts.

    Attributes:
        owners: slot of each row; row r is the own row of slot r if ``owners[r] == r``.
        fed: input tokens; not read for a slot's own row.
        positions: positions of the input tokens.
        active: rows that decode.
        branches: path of each row among the slot's drafts; 0: the path of its own row. None: there is one path.
    """

    owners: Int[Array, " rows"]
    fed: Int[Array, " rows"]
    positions: Int[Array, " rows"]
    active: Bool[Array, " rows"]
    branches: Int[Array, " rows"] | None = None

    @property
    def slot_rows(self) -> Bool[Array, " rows"]:
        """Active rows that are their slots' own."""
        return self.active & (self.owners == jnp.arange(self.owners.shape[0]))

    @property
    def known(self) -> Bool[Array, " rows"]:
        """Rows fed a known token: the slots' own rows, and their copies where branches begin."""
        if self.branches is None:
            return self.slot_rows
        return self.active & (self.positions == jnp.take(self.positions, self.owners, mode="clip"))

    def behind(self) -> Bool[Array, "rows others"]:
        """Whether the other row is of the same slot and path, and at the row's position or before it."""
        same = self._of_slot()
        if self.branches is not None:
            same &= self.branches[:, None] == self.branches
        return same & (self.positions <= self.positions[:, None])

    def first_of(self, rows: Bool[Array, " rows"]) -> Bool[Array, " rows"]:
        """Select of ``rows`` the first of each slot and position, in the order of paths."""
        if self.branches is None:
            return rows
        again = self._of_slot() & rows & (self.positions == self.positions[:, None])
        return rows & ~jnp.any(again & (self.branches < self.branches[:, None]), axis=1)

    def _of_slot(self) -> Bool[Array, "rows others"]:
        """Whether both rows are of one slot."""
        return (self.owners[:, None] == self.owners) & self.active[:, None] & self.active


def params_of_rows(slots: SlotParams, rows: DraftRows) -> SlotParams:
    """Return the parameters of each row: those of its slot."""
    return SlotParams(*(jnp.take(x, rows.owners, axis=0, mode="clip") for x in slots))


def state_of_rows(state: SlotState, rows: DraftRows) -> SlotState:
    """Return the state of each row: that of its slot, as if the drafts up to the row's own were accepted."""
    drafts = rows.behind() & ~rows.known
    count, vocab = rows.owners.shape[0], state.counts.shape[1]
    columns = jnp.where(drafts, rows.fed, vocab)
    counts, prompt, bias, recent = (jnp.take(x, rows.owners, axis=0, mode="clip") for x in state)
    return SlotState(
        counts.at[jnp.arange(count)[:, None], columns].add(1, mode="drop"),
        prompt,
        bias,
        _pushed(recent, jnp.arange(count)[:, None], drafts, rows.positions, rows.fed),
    )


def accepted(rows: DraftRows, sampled: Int[Array, " rows"]) -> Bool[Array, " rows"]:
    """Whether the token that a row samples is the slot's: all drafts up to the row's were sampled by the rows before.

    Args:
        sampled: sampled token of each row.
    """
    before = rows.behind() & (rows.positions == rows.positions[:, None] - 1)
    true = rows.known | jnp.any(before & (sampled == rows.fed[:, None]), axis=1)
    return rows.active & jnp.all(~rows.behind() | true, axis=1)


def advance(state: SlotState, rows: DraftRows, sampled: Int[Array, " rows"]) -> SlotState:
    """Update the state of all slots by the accepted tokens of a step."""
    count = state.counts.shape[0]
    taken = rows.first_of(accepted(rows, sampled))
    owners = jnp.where(taken, rows.owners, count)
    of_slots = taken & (rows.owners == jnp.arange(count)[:, None])
    return state._replace(
        counts=state.counts.at[owners, sampled].add(1, mode="drop"),
        recent=_pushed(state.recent, jnp.arange(count)[:, None], of_slots, rows.positions, sampled),
    )


def _pushed(
    recent: Int32[Array, "rows tail"],
    row: Int[Array, "rows 1"],
    new: Bool[Array, "rows others"],
    positions: Int[Array, " others"],
    tokens: Int[Array, " others"],
) -> Int32[Array, "rows tail"]:
    """Append the ``new`` tokens of each row, at consecutive positions, to its recent tokens."""
    tail = recent.shape[1]
    count = jnp.sum(new, axis=1, keepdims=True)
    last = jnp.max(jnp.where(new, positions, -1), axis=1, keepdims=True)
    old = jnp.take_along_axis(recent, jnp.minimum(jnp.arange(tail) + count, tail - 1), axis=1) if tail else recent
    places = tail - 1 - (last - positions)
    return old.at[row, jnp.where(new & (places >= 0), places, tail)].set(tokens.astype(recent.dtype), mode="drop")
