"""Low-rank products (Hu et al. 2021) of tiles of rows with the adapter of each tile, for GPUs from Ampere on.

Two launches in Pallas Mosaic GPU, the same for sm_80 to sm_90a: `mma`, and plain loads where Hopper could use the TMA.
The kernels read the adapter of each tile and the number of non-empty tiles from device memory: one program serves every
mixture of adapters. Empty tiles are left unwritten; their results are never read.

    shrink, a thread block for a tile and a split of the inputs:
      x [rows, piece], a [rank, piece]  -> registers -> shared memory, while the piece before is multiplied
      sums [rows, rank] += x . a'       -> partial sums of the split, float32

    expand, a thread block for a tile and some channels:
      partial sums of all splits        -> added in order, rounded to the dtype of x -> shared memory
      b [channels, rank]                -> registers -> shared memory
      sums [rows, channels] = hidden . b' -> shared memory -> device memory, in wide stores

All four warps have the same 16 rows and other columns (ranks, channels), 32 together. If ranks are not a multiple of
32, columns of the first product are left undefined, which affect nothing else and are not read again; if not a multiple
of 16, they are padded with zeros for the second.

Splits depend on the number of inputs alone, and a sum is over them in order, 16 at a time: a row is bitwise independent
of its tile, of other tiles, and of the bank. A float32 is split into three bfloat16 which together have all its digits,
and a product into six of theirs: the other three are smaller than float32 rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import compat
from pallas_kernels.grouped_matmul.groups import Groups, taken
from pallas_kernels.layouts import power_of_two, row_layout

__all__ = ["TILE_ROWS", "low_rank", "of_tiles", "refusal"]

TILE_ROWS = (16, 32)  # rows of a tile: the rows of an mma, and the most
_MOST_RANK = {jnp.dtype(dtype): most for dtype, most in ((jnp.bfloat16, 256), (jnp.float16, 256), (jnp.float32, 192))}
_STEP = 16  # 16-bit numbers that one mma sums over
_COLUMNS = 32  # mma columns of four warps
_SPLITS, _LEAST_SPLIT = 8, 256  # most splits of the inputs, and fewest inputs of a split
_UNIT = 64  # inputs in total, and of a split, are multiples of this
_REGISTER_BYTES = 16_384  # in the registers of a CTA at a time: 32 registers of each thread
_BLOCK_BYTES = 65_536  # SMEM for `b`: compute capability 8.9 has 99 KiB
_CHANNELS = (128, 64, 32)  # channels of a CTA: the first that divides and fits
_GAP = 8  # padding between lines of SMEM, so that eight lines are in different banks


class _Shape(NamedTuple):
    """The static parameters of both launches."""

    tiles: int
    rows: int
    slots: int
    rank: int
    inputs: int
    channels: int
    dtype: Any
    interpret: bool

    @property
    def columns(self) -> int:
        """Ranks, padded to columns of an mma."""
        return pl.cdiv(self.rank, _COLUMNS) * _COLUMNS

    @property
    def filled(self) -> int:
        """Ranks, padded to what the second product sums over."""
        return pl.cdiv(self.rank, _STEP) * _STEP

    @property
    def split(self) -> int:
        """Inputs of a split; the last one may have fewer."""
        units = pl.cdiv(self.inputs, _SPLITS * _UNIT)
        return min(self.inputs, max(_LEAST_SPLIT, units * _UNIT))

    @property
    def splits(self) -> int:
        return pl.cdiv(self.inputs, self.split)

    @property
    def piece(self) -> int:
        """Inputs that are multiplied at a time."""
        most = max(_STEP, min(256, _fitting((self.rank + self.rows) * self.dtype.itemsize)))
        return power_of_two(math.gcd(self.split, self.inputs), most)

    @property
    def block_channels(self) -> int:
        line = 2 * self.parts * (self.filled + _GAP)
        return next(one for one in _CHANNELS if self.channels % one == 0 and (one == 32 or one * line <= _BLOCK_BYTES))

    @property
    def operand(self) -> Any:
        """The dtype of the operands of an mma."""
        return jnp.bfloat16 if self.dtype == jnp.float32 else self.dtype

    @property
    def parts(self) -> int:
        """16-bit terms of one number."""
        return 3 if self.dtype == jnp.float32 else 1


def _fitting(size: int) -> int:
    """Return how many items of ``size`` bytes fit into registers, rounded down to a power of two."""
    return 1 << ((_REGISTER_BYTES // size).bit_length() - 1)


def low_rank(
    x: Float[Array, "rows k"],
    a: Float[Array, "slots rank k"],
    b: Float[Array, "slots n rank"],
    groups: Groups,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "rows n"]:
    """See `api.low_rank`: sums in float32, rounded to the dtype of ``x`` after either product.

    Args:
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    if (why := refusal(x, a, b, groups)) is not None:
        raise ValueError(why)
    result = of_tiles(taken(x, groups.entries), a, b, groups, interpret=interpret)
    return taken(result.reshape(-1, b.shape[1]), groups.places)


def of_tiles(
    x: Float[Array, "tiles rows k"],
    a: Float[Array, "slots rank k"],
    b: Float[Array, "slots n rank"],
    groups: Groups,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "tiles rows n"]:
    """Multiply rows that are in tiles, of operands that `refusal` accepts; empty tiles give undefined numbers."""
    assert groups.experts is not None
    (tiles, rows, inputs), (slots, rank, _) = x.shape, a.shape
    shape = _Shape(tiles, rows, slots, rank, inputs, b.shape[1], jnp.dtype(x.dtype), interpret is not None)
    owners, occupied = groups.experts.astype(jnp.int32), groups.occupied.reshape(1).astype(jnp.int32)
    return _launch(x, a, b, owners, occupied, shape, interpret)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _launch(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    owners: jax.Array,
    occupied: jax.Array,
    shape: _Shape,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Launch within a separate jit, so that layers of one shape are lowered once."""
    partial = _shrinker(shape, interpret)(x, a, owners, occupied)[0]
    result: jax.Array = _expander(shape, interpret)(partial, b, owners, occupied)[0]
    return result


def refusal(x: Any, a: Any, b: Any, groups: Groups | None = None) -> str | None:
    """Return why these kernels do not support these shapes and dtypes (of arrays or tracers); None if they do.

    Args:
        groups: None: tiles as the kernels want them.
    """
    if a.ndim != 3 or b.ndim != 3 or (*a.shape[:2], x.shape[-1]) != (b.shape[0], b.shape[2], a.shape[2]):
        return f"x {x.shape} of [rows, inputs], a {a.shape} of [slots, rank, inputs], b {b.shape}"
    if x.dtype not in _MOST_RANK or {a.dtype, b.dtype} != {x.dtype}:
        return f"{x.dtype} times {a.dtype} and {b.dtype}: all must be bfloat16, float16, or float32"
    most = _MOST_RANK[jnp.dtype(x.dtype)]
    if not a.shape[0] or not 1 <= a.shape[1] <= most:
        return f"{a.shape[0]} adapters of rank {a.shape[1]}: at most {most} of {x.dtype}"
    if not a.shape[2] or a.shape[2] % _UNIT or not b.shape[1] or b.shape[1] % _COLUMNS:
        return f"{a.shape[2]} inputs and {b.shape[1]} outputs: multiples of {_UNIT} and of {_COLUMNS} are needed"
    return None if groups is None else _groups_refusal(groups)


def _groups_refusal(groups: Groups) -> str | None:
    tiles, rows = groups.entries.shape
    if groups.experts is None:
        return "every adapter has a tile of its own: the kernels are for tiles that have an adapter each"
    if not tiles or rows % TILE_ROWS[0] or not TILE_ROWS[0] <= rows <= TILE_ROWS[1]:
        return f"{tiles} tiles of {rows} rows: a multiple of {TILE_ROWS[0]}, at most {TILE_ROWS[1]}"
    return None


# --------------------------------------------------------------------------------------------------------------
# The launches.


class _Shrink(NamedTuple):
    """Operands and result in device memory."""

    x: Any  # [tiles, rows, inputs]
    a: Any  # [slots, rank, inputs]
    owners: Any  # [tiles]
    occupied: Any  # [1]
    partial: Any  # [tiles, splits, rows, columns]


class _Expand(NamedTuple):
    partial: Any
    b: Any  # [slots, channels, rank]
    owners: Any
    occupied: Any
    output: Any  # [tiles, rows, channels]


class _Pieces(NamedTuple):
    """A chunk of the inputs, in registers or, as [parts, lines, piece], in SMEM."""

    x: Any  # [rows, piece]
    a: Any  # [rank, piece]


class _Blocks(NamedTuple):
    """Shared memory of the second launch."""

    hidden: Any  # [parts, rows, filled]
    b: Any  # [parts, block_channels, filled]
    output: Any  # [rows, block_channels]


def _shrinker(shape: _Shape, interpret: plgpu.InterpretGPUParams | None) -> Callable[..., Any]:
    result = jax.ShapeDtypeStruct((shape.tiles, shape.splits, shape.rows, shape.columns), jnp.float32)
    smem = _Pieces(*(_lines(shape, count, shape.piece) for count in (shape.rows, shape.columns)))
    return _kernel(shape, _shrink, result, smem, ("split", shape.splits), shape.inputs, interpret)


def _expander(shape: _Shape, interpret: plgpu.InterpretGPUParams | None) -> Callable[..., Any]:
    result = jax.ShapeDtypeStruct((shape.tiles, shape.rows, shape.channels), shape.dtype)
    hidden, b = (_lines(shape, count, shape.filled) for count in (shape.rows, shape.block_channels))
    smem = _Blocks(hidden, b, plgpu.SMEM((shape.rows, shape.block_channels + _GAP), shape.dtype))
    parts = shape.channels // shape.block_channels
    return _kernel(shape, _expand, result, smem, ("part", parts), shape.channels, interpret)


def _lines(shape: _Shape, count: int, length: int) -> Any:
    return plgpu.SMEM((shape.parts, count, length + _GAP), shape.operand)


def _kernel(
    shape: _Shape,
    body: Callable[..., None],
    result: jax.ShapeDtypeStruct,
    smem: Any,
    parts: tuple[str, int],
    length: int,
    interpret: plgpu.InterpretGPUParams | None,
) -> Callable[..., Any]:
    """Make a launch with one CTA per tile and part. Its cost is as if no tile were empty.

    Args:
        parts: name of the grid's axis and number of parts of a tile.
        length: inputs or channels of all parts of a tile together.
    """
    work = shape.tiles * length
    moved = work * (shape.rank + shape.rows) * shape.dtype.itemsize
    return compat.kernel(
        functools.partial(body, shape),
        out_type=(result,),
        scratch_types={"smem": smem},
        grid=(shape.tiles, parts[1]),
        grid_names=("tile", parts[0]),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name=f"lora{body.__name__}",
        # Mosaic inserts the barriers between one warp's writes to SMEM and reads of other warps.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        cost_estimate=pl.CostEstimate(
            flops=2 * work * shape.rows * shape.rank, transcendentals=0, bytes_accessed=moved
        ),
        interpret=interpret,
    )


# --------------------------------------------------------------------------------------------------------------
# The kernels.


def _shrink(shape: _Shape, *refs: Any, smem: _Pieces) -> None:
    gmem, tile = _Shrink(*refs), lax.axis_index("tile")
    pl.when(tile < gmem.occupied[0])(functools.partial(_shrink_split, shape, tile, gmem, smem))


def _shrink_split(shape: _Shape, tile: Any, gmem: _Shrink, smem: _Pieces) -> None:
    split, pieces = lax.axis_index("split"), shape.split // shape.piece
    first, last = split * pieces, shape.inputs // shape.piece - 1

    def step(index: Any, carried: tuple[Any, _Pieces]) -> tuple[Any, _Pieces]:
        sums, piece = carried
        _write(smem.x, piece.x)
        _write(smem.a, piece.a)
        following = _read_piece(shape, tile, jnp.minimum(first + index + 1, last), gmem)
        return _product(shape, sums, smem.x, smem.a, shape.piece), following

    start = _zeros((shape.rows, shape.columns), shape), _read_piece(shape, tile, first, gmem)
    sums, _ = lax.fori_loop(0, jnp.minimum(pieces, last + 1 - first), step, start)
    compat.store(gmem.partial.at[tile, split], sums)


def _read_piece(shape: _Shape, tile: Any, index: Any, gmem: _Shrink) -> _Pieces:
    inputs = pl.ds(pl.multiple_of(index * shape.piece, shape.piece), shape.piece)
    return _Pieces(_read(gmem.x.at[tile, :, inputs]), _read(gmem.a.at[_slot(shape, tile, gmem), :, inputs]))


def _slot(shape: _Shape, tile: Any, gmem: _Shrink | _Expand) -> Any:
    return jnp.clip(gmem.owners[tile], 0, shape.slots - 1)


def _expand(shape: _Shape, *refs: Any, smem: _Blocks) -> None:
    gmem, tile = _Expand(*refs), lax.axis_index("tile")
    pl.when(tile < gmem.occupied[0])(functools.partial(_expand_part, shape, tile, gmem, smem))


def _expand_part(shape: _Shape, tile: Any, gmem: _Expand, smem: _Blocks) -> None:
    first = pl.multiple_of(lax.axis_index("part") * shape.block_channels, shape.block_channels)
    some = min(shape.block_channels, _fitting(shape.rank * shape.dtype.itemsize))
    for line in range(0, shape.block_channels, some):
        _write(smem.b, _read(gmem.b.at[_slot(shape, tile, gmem), pl.ds(first + line, some), :]), line)
    _write(smem.hidden, _hidden(shape, tile, gmem))
    if shape.filled > shape.rank:
        for ref in (smem.b, smem.hidden):
            _clear(ref, shape)
    sums = _zeros((shape.rows, shape.block_channels), shape)
    sums = _product(shape, sums, smem.hidden, smem.b, shape.filled)
    own = smem.output.at[:, : shape.block_channels]
    compat.store(own, sums.astype(shape.dtype))
    compat.store(gmem.output.at[tile, :, pl.ds(first, shape.block_channels)], _read(own))


def _hidden(shape: _Shape, tile: Any, gmem: _Expand) -> Any:
    """Return the result of the first product: its splits, added in their order. [rows, rank]"""
    ranks = pl.ds(0, shape.rank)
    parts = [_read(gmem.partial.at[tile, split, :, ranks]) for split in range(shape.splits)]
    return functools.reduce(jnp.add, parts).astype(shape.dtype)


def _product(shape: _Shape, total: Any, left: Any, right: Any, length: int) -> Any:
    """Add ``left @ right'`` of lines of ``length`` in SMEM to ``total``, in order; small terms first."""
    for first in range(0, length, _STEP):
        along = pl.ds(first, _STEP)
        lefts = [_operand(left.at[part, :, along], shape, plgpu.Layout.MMA_LHS) for part in range(shape.parts)]
        rights = [
            _operand(right.at[part, :, along].transpose((1, 0)), shape, plgpu.Layout.MMA_RHS)
            for part in range(shape.parts)
        ]
        for order in reversed(range(shape.parts)):
            for part in range(order + 1):
                total = _mma(shape, total, lefts[part], rights[order - part])
    return total


def _mma(shape: _Shape, total: Any, left: Any, right: Any) -> Any:
    if shape.interpret:  # the interpreter has no mma
        return total + jnp.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(total, left, right)


def _operand(ref: Any, shape: _Shape, layout: Any) -> Any:
    return plgpu.load(ref, layout=layout(shape.operand, m_warps=1), optimized=False)


def _zeros(dims: tuple[int, ...], shape: _Shape) -> Any:
    return plgpu.layout_cast(jnp.zeros(dims, jnp.float32), plgpu.Layout.MMA_ACC(shape.operand, m_warps=1))


def _read(ref: Any) -> Any:
    return plgpu.load(ref, layout=_layout(ref.shape, ref.dtype), optimized=False)


def _write(ref: Any, value: Any, first: int = 0) -> None:
    """Write numbers to lines of SMEM from ``first`` on, each of their terms to its own array."""
    lines, length = value.shape
    for part in range(ref.shape[0]):
        own = value.astype(ref.dtype)
        compat.store(ref.at[part, pl.ds(first, lines), pl.ds(0, length)], own)
        value = value - own.astype(value.dtype)


def _clear(ref: Any, shape: _Shape) -> None:
    """Write zeros to the padding ranks of all lines."""
    parts, lines, _ = ref.shape
    for part in range(parts):
        rest = ref.at[part, :, pl.ds(shape.rank, shape.filled - shape.rank)]
        zeros = jnp.zeros((lines, shape.filled - shape.rank), ref.dtype)
        compat.store(rest, plgpu.layout_cast(zeros, _layout(zeros.shape, ref.dtype)))


def _layout(dims: tuple[int, ...], dtype: Any) -> Any:
    rows, columns = dims
    return row_layout(rows, columns, 16 // jnp.dtype(dtype).itemsize)[0]
