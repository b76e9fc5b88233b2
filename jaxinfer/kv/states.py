"""Recurrent layers over pools of states: chunks of sequences in prefill, and decode rows that may hold draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxinfer.types import NO_STATE
from pallas_kernels.choice import Wish

Recurrence = Callable[[Any, jax.Array, jax.Array, int], tuple[Any, jax.Array]]


@runtime_checkable
class PooledRecurrence(Protocol):
    """A `Recurrence` that may have a kernel which reads and writes states in a pool: see `LinearAttention.in_pool`."""

    def in_pool(
        self, inputs: Any, pool: jax.Array, read: jax.Array, write: jax.Array, lengths: jax.Array, size: int
    ) -> tuple[Any, jax.Array] | None: ...


class Pieces(NamedTuple):
    """Chunks of sequences ``[batch, time, ...]``, and the indices of their states in a pool.

    Attributes:
        lengths: real tokens of each sequence.
        size: tokens of a scan chunk; ``time`` is a multiple of it.
        read: pool index of the state before each sequence's tokens; beyond the pool: that state is zeros.
        write: pool indices of the states at the ends of pages; beyond the pool: not stored.
        last: index of the scan chunk at whose end each of these states is.
    """

    lengths: Int[Array, " batch"]
    size: int
    read: Int[Array, " batch"]
    write: Int[Array, "batch pages"]
    last: Int[np.ndarray, " pages"]


def run_pieces(
    function: Recurrence, inputs: Any, pool: jax.Array, pieces: Pieces, backend: Wish
) -> tuple[Any, jax.Array]:
    """Run a recurrence over chunks, from the states in a pool, and store the states at page ends. A kernel reads and
    writes the pool directly where the function has one."""
    done = None if backend == "xla" else _by_kernel(function, inputs, pool, pieces)
    if done is not None:
        return done
    exists = (pieces.read < pool.shape[0]).reshape(-1, *[1] * (pool.ndim - 1))
    known = jnp.where(exists, pool.at[pieces.read].get(mode="clip"), 0)
    # Else XLA fuses it with its surroundings, and rounds differently inside a loop (`run_rows`).
    inputs, known, lengths = lax.optimization_barrier((inputs, known, pieces.lengths))
    outputs, states = lax.optimization_barrier(function(inputs, known, lengths, pieces.size))
    kept = states[:, pieces.last].reshape(-1, *pool.shape[1:]).astype(pool.dtype)
    return outputs, pool.at[pieces.write.reshape(-1)].set(kept, mode="drop")


def _by_kernel(function: Any, inputs: Any, pool: jax.Array, pieces: Pieces) -> tuple[Any, jax.Array] | None:
    if not isinstance(function, PooledRecurrence):
        return None
    chunks = jax.tree.leaves(inputs)[0].shape[1] // pieces.size
    write = jnp.full((pieces.write.shape[0], chunks), NO_STATE, jnp.int32).at[:, pieces.last].set(pieces.write)
    return function.in_pool(inputs, pool, pieces.read, write, pieces.lengths, pieces.size)


class StateRows(NamedTuple):
    """Decode rows of one token each, some of which may be fed draft tokens, and the pool indices of their states.

    A slot's own row is fed a known token: its state goes to its page. A draft is known to be accepted only after all
    layers are computed, so the state after a draft row goes to a scratch entry of that row, one of the last in the
    pool, where the row of the next token reads it. `keep_accepted` copies these states to the pages that need them.

    Attributes:
        owners: slot of each row, see `DraftRows`.
        positions: positions of the tokens; -1: the row is idle.
        before: pool index of the state before each position; beyond the pool: that state is zeros.
        home: pool index of the page that has the position.
        page: tokens of a page.
        turns: upper bound of 1 + the draft depth; None: computed from the rows. On several devices a loop is not
        captured in a command buffer, and without a static bound the host would wait for its end.
    """

    owners: Int[Array, " rows"]
    positions: Int[Array, " rows"]
    before: Int[Array, " rows"]
    home: Int[Array, " rows"]
    page: int
    turns: int | None = None

    @property
    def depths(self) -> Int[Array, " rows"]:
        """Draft depth of each row: 0 for rows of a known token, -1 for idle rows."""
        known = jnp.take(self.positions, self.owners, mode="clip")
        return jnp.where(self.positions >= 0, self.positions - known, -1)

    def behind(self) -> Bool[Array, "rows others"]:
        """Whether the other row is of the same slot and at the next position."""
        same = (self.owners[:, None] == self.owners) & (self.positions >= 0)
        return same & (self.positions == self.positions[:, None] + 1)

    def places(self, states: int) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
        """Return the pool indices where each row's state is read and written, in a pool of ``states`` entries."""
        drafts, index = self.depths > 0, jnp.arange(self.owners.shape[0])
        leaves = jnp.where(drafts, states - index.shape[0] + index, self.home)
        parent = jnp.argmax(self.behind().T, axis=1)
        return jnp.where(drafts, leaves[parent], self.before), leaves


def run_rows(
    function: Recurrence, inputs: Any, pool: jax.Array, rows: StateRows, backend: Wish
) -> tuple[Any, jax.Array]:
    """Run a recurrence over rows ``[rows, 1, ...]``: all slots' own rows, then all first drafts, then all second
    drafts.

    Each pass is the same computation of the same number of rows, so a row is bitwise the same whether its token is
    known or a draft. The loop ends with the longest draft.
    """
    depths, (read, leaves), last = rows.depths, rows.places(pool.shape[0]), np.zeros(1, np.int32)

    def turn(depth: Int[Array, ""], pool: jax.Array) -> tuple[Any, jax.Array, Bool[Array, " rows"]]:
        now = depths == depth
        reads, writes = (jnp.where(now, places, NO_STATE) for places in (read, leaves))
        pieces = Pieces(now.astype(jnp.int32), 1, reads, writes[:, None], last)
        return *run_pieces(function, inputs, pool, pieces, backend), now

    def once(depth: Int[Array, ""], carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        outputs, pool = carry
        new, pool, now = turn(depth, pool)
        chosen = jax.tree.map(lambda x, y: jnp.where(now.reshape(-1, *[1] * (x.ndim - 1)), y, x), outputs, new)
        return chosen, pool

    shapes = jax.eval_shape(turn, jnp.int32(0), pool)[0]
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    turns = jnp.max(depths) + 1 if rows.turns is None else rows.turns
    return lax.fori_loop(0, turns, once, (nothing, pool))


def keep_accepted[Pools](pools: Pools, rows: StateRows, accepted: Bool[Array, " rows"]) -> Pools:
    """Copy the states after accepted drafts to their pages: for each page the state of the last accepted row.

    Args:
        pools: any tree of arrays ``[states, *shape]``.
        accepted: rows whose tokens are part of the sequence: see `jaxinfer.sampling.drafts`.
    """
    goes_on = jnp.any(rows.behind() & accepted, axis=1) & ((rows.positions + 1) % rows.page > 0)
    target = jnp.where(accepted & (rows.depths > 0) & ~goes_on, rows.home, NO_STATE)

    def once(_: Any, pools: Pools) -> Pools:
        return jax.tree.map(lambda x: x.at[target].set(x[-target.shape[0] :], mode="drop"), pools)

    turns = jnp.any(target < NO_STATE).astype(jnp.int32) if rows.turns is None else 1
    return lax.fori_loop(0, turns, once, pools)
