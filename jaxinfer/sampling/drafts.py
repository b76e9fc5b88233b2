"""Rows of a decode step that are fed drafts: the sampler's state in them, and which of them came true.

A slot has one row of its own, fed a token that is known, and rows of drafts behind it, fed guesses for the positions
that follow. There may be several paths of them: each but the first begins with a copy of the slot's own row. A draft is
accepted when it is what the row before it samples (Leviathan et al. 2023 with a draw that depends on seed and position
alone), so a row of a draft must see the sampler's state as if it were accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from jaxinfer.sampling.slots import SlotParams, SlotState


class DraftRows(NamedTuple):
    """The rows of a step that may hold drafts.

    Attributes:
        owners: slot of each row; a row is its slot's own where that is the row's number.
        fed: input tokens; those of a slot's own row are not read.
        positions: of the input tokens.
        active: rows that decode.
        branches: paths of a slot's drafts; 0: the one that the slot's own row begins. None: there is one.
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
        """Rows that are fed a known token: the slots' own, and their copies where branches begin."""
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
        """Those of some rows that are their slot's first ones at their positions, in the order of paths."""
        if self.branches is None:
            return rows
        again = self._of_slot() & rows & (self.positions == self.positions[:, None])
        return rows & ~jnp.any(again & (self.branches < self.branches[:, None]), axis=1)

    def _of_slot(self) -> Bool[Array, "rows others"]:
        """Whether both rows are of one slot."""
        return (self.owners[:, None] == self.owners) & self.active[:, None] & self.active


def params_of_rows(slots: SlotParams, rows: DraftRows) -> SlotParams:
    """The parameters of each row: its slot's."""
    return SlotParams(*(jnp.take(x, rows.owners, axis=0, mode="clip") for x in slots))


def state_of_rows(state: SlotState, rows: DraftRows) -> SlotState:
    """The state that each row sees: its slot's, with the drafts up to the row's own as if they were accepted."""
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
        sampled: what each row sampled.
    """
    before = rows.behind() & (rows.positions == rows.positions[:, None] - 1)
    true = rows.known | jnp.any(before & (sampled == rows.fed[:, None]), axis=1)
    return rows.active & jnp.all(~rows.behind() | true, axis=1)


def advance(state: SlotState, rows: DraftRows, sampled: Int[Array, " rows"]) -> SlotState:
    """The state of all slots after the accepted tokens of a step."""
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
    """Push the ``new`` tokens of each row, at consecutive positions, behind its last ones."""
    tail = recent.shape[1]
    count = jnp.sum(new, axis=1, keepdims=True)
    last = jnp.max(jnp.where(new, positions, -1), axis=1, keepdims=True)
    old = jnp.take_along_axis(recent, jnp.minimum(jnp.arange(tail) + count, tail - 1), axis=1) if tail else recent
    places = tail - 1 - (last - positions)
    return old.at[row, jnp.where(new & (places >= 0), places, tail)].set(tokens.astype(recent.dtype), mode="drop")
