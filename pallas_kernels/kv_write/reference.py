"""Reference of a write of new keys and values into a layer's pool, and of its options, token by token.

Keys and values are ``[sequences, chunk, kv_heads, head_dim]``: ``chunk`` consecutive tokens of each sequence, the first
at slot ``offsets`` of the sequence's first page in ``pages``. A token whose page is out of range, above or below, is
dropped; ``pages`` must be wide enough for the chunk at every offset that occurs. Decode is ``chunk`` 1 with one page
per sequence. No slot may be written twice.

Options, identical in every path:

- ``rope``: cosines and sines ``[sequences, chunk, half]``. Keys (and ``q``, when given) are rotated in float32 and cast
  back to their own dtype before anything else (Su et al., arXiv:2104.09864). The first ``2 * half`` numbers of a head
  are rotated, the others are unchanged (partial rotation). Pairs are ``(i, i + half)``, or with ``interleaved``
  neighbours ``(2 i, 2 i + 1)``.
- ``scales`` of a pool in int8 or float8_e4m3fn, float32: factors that dequantize its numbers when they are read.
  ``[pages, 2, kv_heads, page]``, per token: each is computed from its own token and head alone, largest magnitude /
  limit (127 or 448), and is written with it, as KIVI (arXiv:2402.02750) does for values.
  ``[pages, 2, kv_heads]``, per page and head: given, like static scales of vLLM and TensorRT-LLM; a write reads
  them, never changes them, and saturates. `static_scales` makes them for a whole pool.
  A pool in uint8 holds the bits of float8_e4m3fn (`pallas_kernels.bits`).
- ``q [sequences, chunk, heads, head_dim]``: rotated in the same way and returned, not written.

`write_projected` takes all three in one array, the output of a fused QKV projection, ``[sequences, chunk, kv_heads,
group + 2, head_dim]``: the queries of each KV head, its key and its value.

Why a page's scale is given and not computed from its tokens: it must be known at the page's first token, or results
would depend on how a prompt was cut into chunks, and tokens written earlier would have to be requantised. A scale from
the first token would be independent of chunks, but the first token of a sequence is the attention sink, whose values
are close to zero (arXiv:2309.17453): every later value of the page would saturate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import bits

Rope = tuple[Float[Array, "sequences chunk half"], Float[Array, "sequences chunk half"]]

# Largest magnitude of a head of zeros, so that its scale can be a divisor.
SMALLEST = 1e-30


class Written(NamedTuple):
    """The pool after a write, its scales (None if it has none) and the rotated queries (None if none were given)."""

    pool: Num[Array, "pages 2 kv_heads page head_dim"]
    scales: Float[Array, "pages 2 kv_heads *page"] | None = None
    q: Float[Array, "sequences chunk heads head_dim"] | None = None


def limit(dtype: Any) -> float:
    """Return the largest magnitude of a quantised pool's numbers; raise ValueError for other dtypes."""
    limits = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
    if bits.meant(dtype) not in limits:
        raise ValueError(f"a pool with scales must be int8 or float8_e4m3fn, not {jnp.dtype(dtype)}")
    return limits[bits.meant(dtype)]


def static_scales(
    pool: Num[Array, "pages 2 kv_heads page head_dim"], largest: Float[Array, "2 kv_heads"]
) -> Float[Array, "pages 2 kv_heads"]:
    """Return scales of every page for keys (row 0) and values of magnitudes up to ``largest``, from calibration."""
    return jnp.broadcast_to(jnp.asarray(largest, jnp.float32) / limit(pool.dtype), pool.shape[:3])


def rotate(
    x: Float[Array, "*batch heads head_dim"],
    cos: Float[Array, "*batch half"],
    sin: Float[Array, "*batch half"],
    *,
    interleaved: bool = False,
    dtype: Any = jnp.float32,
) -> Float[Array, "*batch heads head_dim"]:
    """Rotate ``x``; compute and return it in ``dtype``."""
    cos, sin = (angle.astype(dtype)[..., None, :] for angle in (cos, sin))
    rotary = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary].astype(dtype), x[..., rotary:].astype(dtype)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    first, second = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        turned = jnp.stack([first, second], axis=-1).reshape(turned.shape)
    else:
        turned = jnp.concatenate([first, second], axis=-1)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def token_scales(x: Float[Array, "*batch head_dim"], dtype: Any) -> Float[Array, "*batch"]:
    """Return one scale for each head of each token, which maps its largest magnitude to the limit of ``dtype``."""
    return jnp.maximum(jnp.abs(x).max(-1), SMALLEST) / limit(dtype)


def quantize(
    x: Float[Array, "*batch head_dim"], scales: Float[Array, "*batch"], dtype: Any
) -> Num[Array, "*batch head_dim"]:
    """Return ``x / scales`` rounded to ``dtype`` (to even), saturated at its limit; uint8: bits of float8_e4m3fn."""
    numbers = x * (1 / jnp.maximum(scales, SMALLEST))[..., None]
    numbers = jnp.clip(numbers, -limit(dtype), limit(dtype))
    kind = bits.meant(dtype)
    return bits.held((jnp.round(numbers) if jnp.issubdtype(kind, jnp.integer) else numbers).astype(kind), dtype)


def quantize_latents(
    latents: Float[Array, "*batch latent"], borders: tuple[int, ...], dtype: Any
) -> tuple[Num[Array, "*batch latent"], Float[Array, "*batch parts"]]:
    """Quantise latents to 8 bits, with a scale per section at ``borders``: latent, rotated key, index key.

    Magnitudes differ between sections: the latent comes from a norm, the key from a projection of any size, and one
    scale for both would leave the smaller few bits. (vLLM's ``fp8_ds_mla`` keeps the key in 16 bits.)
    """
    parts = jnp.split(latents.astype(jnp.float32), borders, axis=-1)
    scales = [token_scales(part, dtype) for part in parts]
    numbers = [quantize(part, scale, dtype) for part, scale in zip(parts, scales, strict=True)]
    return jnp.concatenate(numbers, axis=-1), jnp.stack(scales, axis=-1)


def places(
    pages: Int[Array, "sequences written"], offsets: Int[Array, " sequences"], chunk: int, page: int
) -> tuple[Int[Array, "sequences chunk"], Int[Array, "sequences chunk"]]:
    """Return page and slot of every token; page -1 for tokens beyond the ``written`` pages."""
    at = offsets[:, None] + jnp.arange(chunk)
    own = jnp.take_along_axis(pages, jnp.minimum(at // page, pages.shape[1] - 1), axis=1)
    return jnp.where(at // page < pages.shape[1], own, -1), at % page


def write(
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    k: Float[Array, "sequences chunk kv_heads head_dim"],
    v: Float[Array, "sequences chunk kv_heads head_dim"],
    pages: Int[Array, "sequences written"],
    offsets: Int[Array, " sequences"],
    *,
    scales: Float[Array, "pages 2 kv_heads *page"] | None = None,
    rope: Rope | None = None,
    interleaved: bool = False,
    q: Float[Array, "sequences chunk heads head_dim"] | None = None,
    dtype: Any = jnp.float32,
) -> Written:
    """See the module. Everything is computed in ``dtype``; wider than float32, nothing is rounded in between."""

    def turned(x: jax.Array) -> jax.Array:
        exact = jnp.promote_types(x.dtype, dtype) if jnp.dtype(dtype).itemsize > 4 else x.dtype
        return (x if rope is None else rotate(x, *rope, interleaved=interleaved, dtype=dtype)).astype(exact)

    (sequences, chunk), page = k.shape[:2], pool.shape[3]
    ids, slots = places(pages, offsets, chunk, page)
    rows = jnp.stack([turned(k), v], axis=2).astype(dtype)
    for sequence in range(sequences):
        for token in range(chunk):
            here = jnp.arange(pool.shape[0]) == ids[sequence, token]
            at = here[:, None, None, None] & (jnp.arange(page) == slots[sequence, token])
            row = rows[sequence, token]
            if scales is None:
                pool = jnp.where(at[..., None], row[:, :, None].astype(pool.dtype), pool)
                continue
            if scales.ndim == 4:
                scales = jnp.where(at, token_scales(row, pool.dtype)[:, :, None].astype(scales.dtype), scales)
                own = token_scales(row, pool.dtype)
            else:
                own = scales[jnp.clip(ids[sequence, token], 0, pool.shape[0] - 1)].astype(dtype)
            pool = jnp.where(at[..., None], quantize(row, own, pool.dtype)[:, :, None], pool)
    return Written(pool, scales, None if q is None else turned(q))


def projected(
    qkv: Float[Array, "sequences chunk kv_heads parts head_dim"],
) -> tuple[
    Float[Array, "sequences chunk heads head_dim"],
    Float[Array, "sequences chunk kv_heads head_dim"],
    Float[Array, "sequences chunk kv_heads head_dim"],
]:
    """Split a fused projection into queries, keys and values."""
    q = qkv[..., :-2, :].reshape(*qkv.shape[:2], -1, qkv.shape[-1])
    return q, qkv[..., -2, :], qkv[..., -1, :]


def write_latents(
    pool: Num[Array, "pages page row"],
    latents: Float[Array, "sequences chunk latent"],
    pages: Int[Array, "sequences written"],
    offsets: Int[Array, " sequences"],
) -> Num[Array, "pages page row"]:
    """Write one row per token, key and value of all heads (DeepSeek-V2, arXiv:2405.04434), placed like keys.

    The remaining columns of a longer row are kept.
    """
    (sequences, chunk), page = latents.shape[:2], pool.shape[1]
    ids, slots = places(pages, offsets, chunk, page)
    for sequence in range(sequences):
        for token in range(chunk):
            here = jnp.arange(pool.shape[0])[:, None] == ids[sequence, token]
            at = here & (jnp.arange(page) == slots[sequence, token])
            row = latents[sequence, token].astype(pool.dtype)
            pool = pool.at[..., : row.size].set(jnp.where(at[..., None], row, pool[..., : row.size]))
    return pool
