"""Linear attention prefill, on states in a pool, in Pallas Mosaic GPU: the same code for sm_80 to sm_90a.

A CTA (128 threads) owns some columns of the state of one head of one sequence, and processes the tokens 16 at a time;
the state stays in its registers. Columns are independent of each other. A step:

    device memory                  shared memory                   registers
    keys, queries, a step ahead -> tokens [keys | queries, key] -> scores = keys . (keys | queries)' x decay   (mma)
                                   scores [token, token]        <-   of each token to those after it
                                   state [key, columns]         <- state [key, columns]
                                                                -> taken = keys . state, out = queries . state   (mma)
    values [tokens, columns]    ->                                 change = (values - taken x decay) x beta
                                   scores, a row of each token  -> token by token: change of those after it -= ...
                                                                                   out of those after it    += ...
    out [tokens, columns]       <-
                                   change [tokens, columns]     <- change x decay to the step's end
                                                                -> state = state x decay + keys' . change       (mma)
    pool[write], after a chunk  <-

This is the chunked form (Yang et al. 2024, "Gated Delta Networks") with chunks of 16, whose triangular system is solved
by substitution, in float32. A float32 is split into three bfloat16 which together have all its digits, a product into
six of theirs, or three if keys and queries are bfloat16: as in `pallas_kernels.lora`, no TF32. Sums have a fixed order:
a token is bitwise independent of other sequences, of later tokens and chunks, and of the chunk size.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import compat
from pallas_kernels.layouts import row_layout
from pallas_kernels.linear_attention.mosaic.refusal import TOKENS
from pallas_kernels.linear_attention.mosaic.refusal import prefill_refusal as refusal

__all__ = ["Tiles", "heuristic_tiles", "prefill", "refusal"]

_COLUMNS = (32, 64)  # columns of a CTA: the mma columns of four warps, and the limit of registers at 128 keys
_PARTS = 3  # bfloat16 terms of a float32
_LHS, _RHS = plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS
_GAP = 8  # padding between lines of SMEM, so that eight lines are in different banks


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes; results are bitwise independent of them.

    Attributes:
        columns: columns of a state per CTA, 32 or 64.

    Raises:
        ValueError: unsupported values.
    """

    columns: int = 64

    def __post_init__(self) -> None:
        if self.columns not in _COLUMNS:
            raise ValueError(f"columns must be one of {_COLUMNS}: {self}")


def heuristic_tiles(heads: int, key: int, value: int, *, multiprocessors: int = 132) -> Tiles:
    """Return more columns, which share their scores, if every multiprocessor still gets a CTA and registers suffice.

    Args:
        heads: heads of all sequences.
    """
    few = value % 64 or key > 128 or heads * value // 64 < multiprocessors
    return Tiles(32 if few else 64)


class _Shape(NamedTuple):
    """The static parameters of one launch."""

    batch: int
    steps: int
    chunk: int  # steps of a chunk
    heads: int
    group: int  # heads that share a key and a query
    key: int
    value: int
    states: int
    columns: int
    parts: int  # bfloat16 terms of a key or a query
    interpret: bool


class _Gmem(NamedTuple):
    """Operands and result in device memory."""

    q: Any  # [batch, time, k_heads, key]
    k: Any
    v: Any  # [batch, time, heads, value]
    since: Any  # [batch, heads, steps, 2 tokens] float32: decay since the step began, twice
    beta: Any | None  # [batch, heads, steps, 2 tokens] float32: beta, then ones
    read: Any  # [batch]
    write: Any  # [batch, chunks]
    pool: Any  # [states, heads, key, value] float32, written
    out: Any  # [batch, time, heads, value] float32


class _Smem(NamedTuple):
    """Shared memory of one CTA."""

    tokens: Any  # [parts, 2 tokens, key]: keys, then queries
    state: Any  # [_PARTS, key, columns]
    change: Any  # [_PARTS, tokens, columns]
    scores: Any  # [tokens, 2 tokens] float32


class _Step(NamedTuple):
    """The operands of one step, in registers."""

    keys: Any  # [tokens, key]
    queries: Any
    values: Any  # [tokens, columns]
    of_columns: Any  # decay since the step began, of [2 tokens], along columns
    since: Any  # decay since the step began, of [tokens], along rows
    beta: tuple[Any, Any] | None  # along columns, then along rows


def prefill(
    q: Float[Array, "batch time k_heads key"],
    k: Float[Array, "batch time k_heads key"],
    v: Float[Array, "batch time heads value"],
    decay: Float[Array, "batch time heads"],
    beta: Float[Array, "batch time heads"] | None,
    pool: Float[Array, "states heads key value"],
    read: Int[Array, " batch"],
    write: Int[Array, "batch chunks"],
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "states heads key value"]]:
    """See `reference.prefill`.

    Args:
        tiles: None: `heuristic_tiles`.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    if (why := refusal(q, k, v, decay, beta, pool, read, write)) is not None:
        raise ValueError(why)
    (batch, time, heads, value), (k_heads, key) = v.shape, q.shape[2:]
    shape = _Shape(
        batch=batch,
        steps=time // TOKENS,
        chunk=time // TOKENS // write.shape[1],
        heads=heads,
        group=heads // k_heads,
        key=key,
        value=value,
        states=pool.shape[0],
        columns=(tiles or heuristic_tiles(batch * heads, key, value)).columns,
        parts=1 if q.dtype == k.dtype == jnp.bfloat16 else _PARTS,
        interpret=interpret is not None,
    )
    since, ones = _sums(_by_step(decay)), jnp.ones((batch, heads, shape.steps, TOKENS), jnp.float32)
    gates = _doubled(since, since), None if beta is None else _doubled(_by_step(beta), ones)
    return _launch(shape, interpret, (q, k, v, *gates, read.astype(jnp.int32), write.astype(jnp.int32)), pool)


def _by_step(gate: Float[Array, "batch time heads"]) -> Float[Array, "batch heads steps tokens"]:
    cut = gate.astype(jnp.float32).reshape(gate.shape[0], -1, TOKENS, gate.shape[2])
    return jnp.moveaxis(cut, 3, 1)


def _sums(steps: Float[Array, "batch heads steps tokens"]) -> Float[Array, "batch heads steps tokens"]:
    """Return running sums, in a fixed order that XLA cannot change."""
    return jnp.stack(list(itertools.accumulate(jnp.unstack(steps, axis=-1))), axis=-1)


def _doubled(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.concatenate([first, second], axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(
    shape: _Shape, interpret: plgpu.InterpretGPUParams | None, given: tuple[Any, ...], pool: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Launch within a separate jit, so that layers of one shape are lowered once."""
    ref = jax.new_ref(pool)
    (out,) = _launcher(shape, jax.tree.structure(given), interpret)(*jax.tree.leaves(given), ref)
    return out, jax.freeze(ref)


def _launcher(shape: _Shape, tree: Any, interpret: plgpu.InterpretGPUParams | None) -> Callable[..., Any]:
    result = (shape.batch, shape.steps * TOKENS, shape.heads, shape.value)
    numbers = shape.batch * shape.steps * shape.heads * TOKENS * shape.value
    return compat.kernel(
        functools.partial(_body, shape, tree),
        out_type=(jax.ShapeDtypeStruct(result, jnp.float32),),
        scratch_types={"smem": _smem(shape)},
        grid=(shape.batch, shape.heads, shape.value // shape.columns),
        grid_names=("sequence", "head", "part"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="linear_prefill",
        # Mosaic inserts the barriers between one warp's writes to SMEM and reads of other warps.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        cost_estimate=pl.CostEstimate(flops=6 * numbers * shape.key, transcendentals=0, bytes_accessed=16 * numbers),
        interpret=interpret,
    )


def _smem(shape: _Shape) -> _Smem:
    def lines(parts: int, count: int, length: int) -> Any:
        return plgpu.SMEM((parts, count, length + _GAP), jnp.bfloat16)

    return _Smem(
        tokens=lines(shape.parts, 2 * TOKENS, shape.key),
        state=lines(_PARTS, shape.key, shape.columns),
        change=lines(_PARTS, TOKENS, shape.columns),
        scores=plgpu.SMEM((TOKENS, 2 * TOKENS), jnp.float32),
    )


# --------------------------------------------------------------------------------------------------------------
# The kernel.


class _Place(NamedTuple):
    """The sequence, head and columns of a CTA. Traced scalars, and a slice."""

    sequence: Any
    head: Any
    columns: Any


def _body(shape: _Shape, tree: Any, *refs: Any, smem: _Smem) -> None:
    gmem = _Gmem(*jax.tree.unflatten(tree, refs[: tree.num_leaves]), *refs[tree.num_leaves :])
    columns = pl.ds(pl.multiple_of(lax.axis_index("part") * shape.columns, shape.columns), shape.columns)
    place = _Place(lax.axis_index("sequence"), lax.axis_index("head"), columns)

    def once(index: Any, carried: tuple[Any, _Step]) -> tuple[Any, _Step]:
        state, step = carried
        _write(smem.tokens, step.keys, 0)
        _write(smem.tokens, step.queries, TOKENS)
        _write(smem.state, state, 0)
        following = _read(shape, gmem, place, jnp.minimum(index + 1, shape.steps - 1))
        compat.store(smem.scores, _scores(shape, step, smem))
        change, out = _substituted(shape, step, *_from_state(shape, smem), smem)
        compat.store(_tokens_of(gmem.out, place, index), out)
        last = gmem.since[place.sequence, place.head, index, TOKENS - 1]
        _write(smem.change, change * _rows(jnp.exp(last - step.since), shape.columns), 0)
        state = _changed(shape, state * jnp.exp(last), smem)
        _keep(shape, gmem, place, index, state)
        return state, following

    lax.fori_loop(0, shape.steps, once, (_begin(shape, gmem, place), _read(shape, gmem, place, jnp.int32(0))))


def _begin(shape: _Shape, gmem: _Gmem, place: _Place) -> Any:
    """Load the state, or return zeros if there is none."""
    read = gmem.read[place.sequence]

    def found() -> Any:
        return _load(gmem.pool.at[read, place.head, :, place.columns], _acc(4))

    return lax.cond((read >= 0) & (read < shape.states), found, lambda: _zeros((shape.key, shape.columns), 4))


def _keep(shape: _Shape, gmem: _Gmem, place: _Place, index: Any, state: Any) -> None:
    """Store the state to the pool, at the end of a chunk."""
    chunk = lax.div(index, jnp.int32(shape.chunk))
    write = gmem.write[place.sequence, chunk]
    meant = (index + 1 == (chunk + 1) * shape.chunk) & (write >= 0) & (write < shape.states)
    pl.when(meant)(lambda: compat.store(gmem.pool.at[write, place.head, :, place.columns], state))


def _read(shape: _Shape, gmem: _Gmem, place: _Place, index: Any) -> _Step:
    at, k_head = (place.sequence, pl.ds(index * TOKENS, TOKENS)), lax.div(place.head, jnp.int32(shape.group))

    def tokens(ref: Any) -> Any:
        layout = row_layout(TOKENS, shape.key, 16 // jnp.dtype(ref.dtype).itemsize)[0]
        return _load(ref.at[(*at, k_head)], layout)

    def gate(ref: Any) -> tuple[Any, Any]:
        own = ref.at[place.sequence, place.head, index]
        return _load(own, _acc(1).reduce(0)), _load(own.at[pl.ds(0, TOKENS)], _acc(1).reduce(1))

    return _Step(
        tokens(gmem.k),
        tokens(gmem.q),
        _load(_tokens_of(gmem.v, place, index), _acc(1)),
        *gate(gmem.since),
        None if gmem.beta is None else gate(gmem.beta),
    )


def _tokens_of(ref: Any, place: _Place, index: Any) -> Any:
    """Slice the values or outputs of a step. [tokens, columns]"""
    return ref.at[place.sequence, pl.ds(index * TOKENS, TOKENS), place.head, place.columns]


def _scores(shape: _Shape, step: _Step, smem: _Smem) -> Any:
    """Return scores of each token (a row) with later keys (times beta), and with its own and later queries."""
    dims = (TOKENS, 2 * TOKENS)
    total = _zeros(dims, 1)
    for first in range(0, shape.key, TOKENS):
        along = pl.ds(first, TOKENS)
        keys = _operands(smem.tokens.at[:, pl.ds(0, TOKENS), along], _LHS, 1)
        total = _product(shape, total, keys, _operands(smem.tokens.at[:, :, along], _RHS, 1, turned=True))
    row, column = (plgpu.broadcasted_iota(jnp.int32, dims, axis, layout=_acc(1)) for axis in (0, 1))
    past = _columns(step.of_columns, TOKENS) - _rows(step.since, 2 * TOKENS)
    total = total * jnp.exp(jnp.minimum(past, 0.0))
    if step.beta is not None:
        total = total * _columns(step.beta[0], TOKENS)
    return jnp.where(column > row + jnp.where(column < TOKENS, 0, TOKENS - 1), total, jnp.zeros_like(total))


def _from_state(shape: _Shape, smem: _Smem) -> tuple[Any, Any]:
    """Return the state under the keys, and under the queries. [tokens, columns] each"""
    totals = [_zeros((TOKENS, shape.columns), 1) for _ in range(2)]
    for first in range(0, shape.key, TOKENS):
        along = pl.ds(first, TOKENS)
        state = _operands(smem.state.at[:, along, pl.ds(0, shape.columns)], _RHS, 1)
        for side in range(2):
            tokens = _operands(smem.tokens.at[:, pl.ds(side * TOKENS, TOKENS), along], _LHS, 1)
            totals[side] = _product(shape, totals[side], tokens, state)
    return totals[0], totals[1]


def _substituted(shape: _Shape, step: _Step, taken: Any, out: Any, smem: _Smem) -> tuple[Any, Any]:
    """Return each token's addition to the state under its key, and the outputs. [tokens, columns] each"""
    before = _rows(jnp.exp(step.since), shape.columns)
    out, change = out * before, step.values.astype(jnp.float32)
    if step.beta is not None:
        change = (change - taken * before) * _rows(step.beta[1], shape.columns)
    row = plgpu.broadcasted_iota(jnp.int32, change.shape, 0, layout=_acc(1))
    for token in range(TOKENS):
        # All other rows are zeros, so the sum is exact.
        own = jnp.where(row == token, change, jnp.zeros_like(change)).sum(axis=0)
        own = _columns(own, TOKENS)
        if step.beta is not None:
            change = change - own * _score(shape, smem, token, 0)
        out = out + own * _score(shape, smem, token, TOKENS)
    return change, out


def _score(shape: _Shape, smem: _Smem, token: int, first: int) -> Any:
    return _rows(_load(smem.scores.at[token, pl.ds(first, TOKENS)], _acc(1).reduce(1)), shape.columns)


def _changed(shape: _Shape, state: Any, smem: _Smem) -> Any:
    keys = _operands(smem.tokens.at[:, pl.ds(0, TOKENS), pl.ds(0, shape.key)], _LHS, 4, turned=True)
    return _product(shape, state, keys, _operands(smem.change.at[:, :, pl.ds(0, shape.columns)], _RHS, 4))


def _product(shape: _Shape, total: Any, lefts: Sequence[Any], rights: Sequence[Any]) -> Any:
    """Add ``left @ right`` of split numbers to ``total``: small terms first, without the negligible ones."""
    for order in reversed(range(_PARTS)):
        for part, left in enumerate(lefts):
            if 0 <= order - part < len(rights):
                total = _mma(shape, total, left, rights[order - part])
    return total


def _mma(shape: _Shape, total: Any, left: Any, right: Any) -> Any:
    if shape.interpret:  # the interpreter has no mma
        return total + jnp.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(total, left, right)


def _operands(ref: Any, layout: Any, warps: int, *, turned: bool = False) -> list[Any]:
    """Load the terms of an operand of a product, for ``warps`` warps along its rows."""
    parts = [ref.at[part].transpose((1, 0)) if turned else ref.at[part] for part in range(ref.shape[0])]
    return [_load(part, layout(jnp.bfloat16, m_warps=warps)) for part in parts]


def _write(ref: Any, value: Any, first: int) -> None:
    """Write numbers to lines of SMEM from ``first`` on, each of their terms to its own array."""
    lines, length = value.shape
    for part in range(ref.shape[0]):
        own = value.astype(ref.dtype)
        compat.store(ref.at[part, pl.ds(first, lines), pl.ds(0, length)], own)
        value = value - own.astype(value.dtype)


def _load(ref: Any, layout: Any) -> Any:
    return plgpu.load(ref, layout=layout, optimized=False)


def _acc(warps: int) -> Any:
    return plgpu.Layout.MMA_ACC(jnp.bfloat16, m_warps=warps)


def _zeros(dims: tuple[int, ...], warps: int) -> Any:
    return plgpu.layout_cast(jnp.zeros(dims, jnp.float32), _acc(warps))


def _columns(vector: Any, rows: int) -> Any:
    """Broadcast one number per column to all rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (rows, vector.shape[0]), (1,)), _acc(1))


def _rows(vector: Any, columns: int) -> Any:
    """Broadcast one number per row to all columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (vector.shape[0], columns), (0,)), _acc(1))
