"""Linear attention decode, on states in a pool, in Pallas Mosaic GPU: the same code for sm_80 to sm_90a.

The traffic is one read and one write of each state. A CTA (128 threads) holds some columns of the state of one head of
one row, with all keys, in registers; columns are independent of each other:

    device memory                     registers of 128 threads                          device memory
    pool[read, head, key, columns] -> state [key, columns] x decay
    k [key], v [columns]           -> change = (v - sum over keys of k x state) x beta
                                      state += k x change                            -> pool[write, head, key, columns]
    q [key]                        -> out = sum over keys of q x state               -> out[row, head, columns]

All arithmetic is float32, in an order that depends on keys and columns only: a row is bitwise independent of the
others. The pool is a mutable reference: a donated one is updated in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import compat
from pallas_kernels.layouts import THREADS, power_of_two, row_layout
from pallas_kernels.linear_attention.mosaic.refusal import decode_refusal as refusal

__all__ = ["Tiles", "decode", "refusal"]

_VECTOR = 4  # float32 numbers of one load or store


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes. The last bits of a result depend on them: they change the order of sums over keys.

    Attributes:
        columns: columns of a state per CTA, a power of two from 16 to 64; fewer if they do not divide the value.

    Raises:
        ValueError: unsupported values.
    """

    columns: int = 32

    def __post_init__(self) -> None:
        if self.columns & (self.columns - 1) or not 16 <= self.columns <= 64:
            raise ValueError(f"columns must be a power of two from 16 to 64: {self}")


class _Shape(NamedTuple):
    """The static parameters of one launch."""

    rows: int
    heads: int
    group: int  # heads that share a key and a query
    key: int
    value: int
    states: int
    columns: int

    @property
    def layout(self) -> Any:
        return row_layout(self.key, self.columns, _VECTOR)[0]


class _Gmem(NamedTuple):
    """Operands and result in device memory."""

    q: Any  # [rows, k_heads, key]
    k: Any
    v: Any  # [rows, heads, value]
    kept: Any  # [rows, heads] float32: factor of a state
    beta: Any | None  # [rows, heads] float32
    read: Any  # [rows]
    write: Any  # [rows]
    pool: Any  # [states, heads, key, value] float32, written
    out: Any  # [rows, heads, value] float32


def decode(
    q: Float[Array, "rows k_heads key"],
    k: Float[Array, "rows k_heads key"],
    v: Float[Array, "rows heads value"],
    decay: Float[Array, "rows heads"],
    beta: Float[Array, "rows heads"] | None,
    pool: Float[Array, "states heads key value"],
    read: Int[Array, " rows"],
    write: Int[Array, " rows"],
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "rows heads value"], Float[Array, "states heads key value"]]:
    """See `reference.decode`.

    Args:
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    if (why := refusal(q, k, v, decay, beta, pool, read, write)) is not None:
        raise ValueError(why)
    (rows, heads, value), (_, k_heads, key) = v.shape, q.shape
    columns = power_of_two(value, (tiles or Tiles()).columns)
    shape = _Shape(rows, heads, heads // k_heads, key, value, pool.shape[0], columns)
    kept, change = jnp.exp(decay.astype(jnp.float32)), None if beta is None else beta.astype(jnp.float32)
    places = read.astype(jnp.int32), write.astype(jnp.int32)
    return _launch(shape, interpret, (q, k, v, kept, change, *places), pool)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(
    shape: _Shape, interpret: plgpu.InterpretGPUParams | None, given: tuple[Any, ...], pool: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Launch within a separate jit, so that layers of one shape are lowered once."""
    ref = jax.new_ref(pool)
    launch = _launcher(shape, jax.tree.structure(given), interpret)
    (out,) = launch(*jax.tree.leaves(given), ref)
    return out, jax.freeze(ref)


def _launcher(shape: _Shape, tree: Any, interpret: plgpu.InterpretGPUParams | None) -> Callable[..., Any]:
    numbers = shape.rows * shape.heads * shape.key * shape.value
    return compat.kernel(
        functools.partial(_body, shape, tree),
        out_type=(jax.ShapeDtypeStruct((shape.rows, shape.heads, shape.value), jnp.float32),),
        scratch_types=(),
        grid=(shape.rows, shape.heads, shape.value // shape.columns),
        grid_names=("row", "head", "part"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="linear_decode",
        # Sums over keys go through SMEM: Mosaic inserts the barriers.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=_VECTOR * 4 * THREADS
        ),
        cost_estimate=pl.CostEstimate(flops=7 * numbers, transcendentals=0, bytes_accessed=8 * numbers),
        interpret=interpret,
    )


# --------------------------------------------------------------------------------------------------------------
# The kernel.


def _body(shape: _Shape, tree: Any, *refs: Any) -> None:
    gmem = _Gmem(*jax.tree.unflatten(tree, refs[: tree.num_leaves]), *refs[tree.num_leaves :])
    row, head = lax.axis_index("row"), lax.axis_index("head")
    columns = pl.ds(lax.axis_index("part") * shape.columns, shape.columns)
    read, write, at = gmem.read[row], gmem.write[row], (row, lax.div(head, jnp.int32(shape.group)))
    # Issue all loads before waiting for any.
    key, query = (_vector(shape, ref.at[at], axis=0) for ref in (gmem.k, gmem.q))
    change, kept = _vector(shape, gmem.v.at[row, head, columns], axis=1), gmem.kept[row, head]
    beta = None if gmem.beta is None else gmem.beta[row, head]
    state, key = _begin(shape, gmem, read, head, columns) * kept, _along(shape, key, axis=0)
    if beta is not None:
        change = (change - (state * key).sum(axis=0)) * beta
    state = state + key * _along(shape, change, axis=1)
    exists = (write >= 0) & (write < shape.states)
    pl.when(exists)(lambda: compat.store(gmem.pool.at[write, head, :, columns], state))
    compat.store(gmem.out.at[row, head, columns], (state * _along(shape, query, axis=0)).sum(axis=0))


def _begin(shape: _Shape, gmem: _Gmem, read: Any, head: Any, columns: Any) -> Any:
    """Load the state, or return zeros if there is none."""

    def found() -> Any:
        return plgpu.load(gmem.pool.at[read, head, :, columns], layout=shape.layout, optimized=False)

    def new() -> Any:
        return plgpu.layout_cast(jnp.zeros((shape.key, shape.columns), jnp.float32), shape.layout)

    return lax.cond((read >= 0) & (read < shape.states), found, new)


def _vector(shape: _Shape, ref: Any, *, axis: int) -> Any:
    """Load numbers along an axis of the state: keys (0) or columns (1). In float32."""
    return plgpu.load(ref, layout=shape.layout.reduce(1 - axis), optimized=False).astype(jnp.float32)


def _along(shape: _Shape, vector: Any, *, axis: int) -> Any:
    """Broadcast a vector over the state."""
    spread = lax.broadcast_in_dim(vector, (shape.key, shape.columns), (axis,))
    return plgpu.layout_cast(spread, shape.layout)
