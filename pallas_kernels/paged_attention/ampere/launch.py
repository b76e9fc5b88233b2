"""Paged attention for GPUs below Hopper, which have neither the TMA nor wgmma, in Pallas Mosaic GPU.

One CTA of 128 threads has a *unit*: the keys that some tokens of one sequence see, or one segment of them, for one KV
head. Keys are the rows of both products, as in the decode kernel for Hopper; the columns, 8 to 48, are the queries of
the KV head's group of one token (decode) or of a few consecutive tokens, ``token * group + head``:

    pages, by cp.async ->  keys   [stages, 64, dim] -> scores [64, columns]  = keys . queries       (mma)
                       ->  values [stages, 64, dim]    probs  [64, columns]  <- softmax, 16 bits
                                                    -> sums   [dim, columns] += values' . probs     (mma)

``stages - 1`` key blocks are in flight while one is computed. Copies are waited for by count, so every step must issue
the same number: beyond a unit's end it copies the last block again, from the L2 cache.

Keys are cut into segments at absolute positions, whose sums are folded in order (`sums`). If one unit has all of a
sequence's queries (decode, draft tokens), each segment is a separate unit, to get enough CTAs, and a second kernel
folds them (`merge`); a longer chunk has enough units of tokens, each of which processes all segments that it sees.
Maxima are rounded to integers (scores are in powers of two), so rescaling is exact: a position is bitwise independent
of other rows, of its pages, and of whether it is decoded or part of a chunk.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.ampere.kernel import LOG2_E, Shape, Tiles, launcher
from pallas_kernels.paged_attention.ampere.merge import merger
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.trees import MOST_IN_TREE, tree_words

__all__ = ["Tiles", "decode", "extend", "refusal"]

HEAD_DIMS = (64, 128)
PAGES = (16, 32, 64, 128)
COLUMNS = 48  # queries of a CTA: with more, registers would spill
_THREADS = 128  # threads, each of which loads equally many numbers of the queries
_LEAST_COPY = 2048  # numbers: 16 bytes for each of 128 threads


def decode(
    q: Float[Array, "rows heads head_dim"],
    pool: Float[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    options: AttentionOptions,
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """See `reference.decode`, and `extend`."""
    starts = jnp.maximum(lengths - 1, 0)
    return extend(q[:, None], pool, tables, starts, lengths, options, tiles=tiles, interpret=interpret)[:, 0]


def extend(
    q: Float[Array, "sequences chunk heads head_dim"],
    pool: Float[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    options: AttentionOptions,
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "sequences chunk heads head_dim"]:
    """See `reference.prefill`: chunks of any length. Probabilities are rounded to 16 bits. Padding gives zeros.

    Args:
        tiles: block sizes; None: untuned defaults.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    if (why := refusal((q, pool, tables, starts, lengths), options)) is not None:
        raise ValueError(why)
    starts, lengths = starts.astype(jnp.int32), lengths.astype(jnp.int32)
    shape = _shape_of(q, pool, tables, options, tiles or _heuristic_tiles(q), interpret is not None)
    bounds = _bounds(shape, starts, lengths, options.tree)
    sinks = _by_head(shape, options.sinks)
    operands = (_parted(shape, q), pool, tables.astype(jnp.int32), starts, lengths, *bounds, *sinks)
    sums, stats = launcher(shape, interpret)(*operands)
    results = sums[:, :, 0] if shape.whole else merger(shape, interpret)(starts, lengths, *sinks, sums, stats)
    return _unparted(shape, q, results)


def refusal(operands: tuple[Any, ...], options: AttentionOptions) -> str | None:
    """Return why this kernel does not support `decode` or `extend` of these operands; None if it does."""
    (q, pool, tables, *per_row), tree, sinks = operands, options.tree, options.sinks
    if q.ndim == 3:
        q = jax.ShapeDtypeStruct((q.shape[0], 1, *q.shape[1:]), q.dtype)
    (sequences, chunk, heads, head_dim), (_, two, kv_heads, page, pool_dim) = q.shape, pool.shape
    if two != 2 or pool_dim != head_dim or heads % kv_heads:
        return f"queries {q.shape} and pool {pool.shape} do not fit each other"
    if {tables.shape[:1], *(each.shape for each in per_row)} != {(sequences,)}:
        return f"{sequences} rows, but tables {tables.shape} and lengths {per_row[-1].shape}"
    if head_dim not in HEAD_DIMS or page not in PAGES or page * head_dim < _LEAST_COPY:
        return (
            f"head_dim {head_dim}, pages of {page}: below Hopper the kernel does {HEAD_DIMS} and {PAGES}, not 64 and 16"
        )
    if heads // kv_heads > COLUMNS:
        return f"{heads // kv_heads} heads to a KV head: below Hopper the kernel does {COLUMNS}"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or pool.dtype != q.dtype or options.scales is not None:
        return f"queries of {q.dtype}, a pool of {pool.dtype}: below Hopper the kernel does bfloat16, and float16"
    if tree is not None and (tree.shape != (sequences, chunk, chunk) or chunk > MOST_IN_TREE):
        return f"a tree of shape {tree.shape}: [sequences, chunk, chunk] with at most {MOST_IN_TREE} tokens is needed"
    if why := options.refusal:
        return why
    return None if sinks is None or sinks.shape == (heads,) else f"{heads} heads, but sinks {sinks.shape}"


def _shape_of(q: Any, pool: Any, tables: Any, options: AttentionOptions, tiles: Tiles, interpret: bool) -> Shape:
    (sequences, chunk, heads, head_dim), (kv_heads, page) = q.shape, pool.shape[2:4]
    tokens = min(chunk, COLUMNS // (heads // kv_heads))
    parts = pl.cdiv(chunk, tokens)
    return Shape(
        sequences=sequences,
        parts=parts,
        tokens=tokens,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        page=page,
        head_dim=head_dim,
        splits=pl.cdiv(tables.shape[1] * page, tiles.keys_per_split) if parts == 1 else 1,
        dtype=jnp.dtype(q.dtype),
        options=options.flags,
        tiles=tiles,
        interpret=interpret,
    )


def _heuristic_tiles(q: Any) -> Tiles:
    """Return tiles for the 99 KiB of a CTA on compute capability 8.6 and 8.9. Not measured on a GPU yet."""
    return Tiles(stages=3 if q.shape[-1] == HEAD_DIMS[0] else 2)


def _parted(
    shape: Shape, q: Float[Array, "sequences chunk heads head_dim"]
) -> Float[Array, "units kv_heads rows head_dim"]:
    """Split queries into units: a column is a head of a group of a token, by token."""
    missing = shape.parts * shape.tokens - q.shape[1]
    q = jnp.pad(q, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else q
    q = q.reshape(shape.units, shape.tokens, shape.kv_heads, shape.group, shape.head_dim)
    q = jnp.swapaxes(q, 1, 2).reshape(shape.units, shape.kv_heads, -1, shape.head_dim)
    if q.shape[2] * shape.head_dim % _THREADS == 0:
        return q
    return jnp.pad(q, ((0, 0), (0, 0), (0, shape.columns - q.shape[2]), (0, 0)))


def _unparted(
    shape: Shape, q: Any, mixed: Float[Array, "units kv_heads head_dim columns"]
) -> Float[Array, "sequences chunk heads head_dim"]:
    """Undo `_parted`."""
    mixed = mixed[..., : shape.tokens * shape.group]
    mixed = mixed.reshape(*mixed.shape[:3], shape.tokens, shape.group)
    mixed = mixed.transpose(0, 3, 1, 4, 2).reshape(shape.sequences, shape.parts * shape.tokens, *q.shape[2:])
    return mixed[:, : q.shape[1]].astype(q.dtype)


def _bounds(
    shape: Shape, starts: Int[Array, " sequences"], lengths: Int[Array, " sequences"], tree: Any
) -> tuple[Int[Array, "units columns"], Int[Array, "units columns"], Int[Array, "units columns"]]:
    """Return the bounds of visible keys, see `Gmem`; padding sees nothing."""
    at = starts[:, None] + jnp.arange(shape.parts * shape.tokens)
    real, depth, high, seen = at < lengths[:, None], at, at + 1, jnp.zeros_like(at)
    if tree is not None:
        missing = ((0, 0), (0, at.shape[1] - tree.shape[1]))
        seen, depth = (jnp.pad(each, missing) for each in tree_words(tree))
        high = jnp.broadcast_to(starts[:, None], at.shape)
        depth = depth + high
    low = jnp.zeros_like(at) if shape.options.window is None else jnp.maximum(depth - (shape.options.window - 1), 0)
    low, high, seen = (_of_columns(shape, jnp.where(real, each, 0)) for each in (low, high, seen))
    return low, high, seen


def _of_columns(shape: Shape, of_tokens: Int[Array, "sequences padded"]) -> Int[Array, "units columns"]:
    repeated = jnp.repeat(of_tokens.reshape(shape.units, shape.tokens), shape.group, axis=1)
    return jnp.pad(repeated, ((0, 0), (0, shape.columns - repeated.shape[1])))


def _by_head(shape: Shape, sinks: Array | None) -> tuple[Float[Array, "kv_heads columns"], ...]:
    """Return the sinks in powers of two, per KV head and column; () without sinks."""
    if sinks is None:
        return ()
    grouped = sinks.astype(jnp.float32).reshape(shape.kv_heads, shape.group) * LOG2_E
    grouped = jnp.tile(grouped, (1, shape.tokens))
    return (jnp.pad(grouped, ((0, 0), (0, shape.columns - grouped.shape[1]))),)
