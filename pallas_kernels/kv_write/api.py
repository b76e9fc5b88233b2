"""API of kv_write: one Mosaic kernel for Ampere, Ada and Hopper GPUs, XLA everywhere else."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.choice import ADA, AMPERE, HOPPER, Choice, Target, Wish, choose
from pallas_kernels.kv_write import mosaic, xla
from pallas_kernels.kv_write.reference import Rope, Written, projected
from pallas_kernels.launches import noted

_OP = "kv_write"


def explain(
    pool: Any,
    k: Any,
    v: Any,
    *,
    scales: Any | None = None,
    rope: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    q: Any | None = None,
    path: Wish = "auto",
    target: Target | None = None,
) -> Choice:
    """Return the path that `write` takes for operands of these shapes and dtypes, and why.

    Args:
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: the Mosaic kernel is forced and does not support these operands.
    """
    refusal = mosaic.refusal(pool, k, v, scales=scales, rope=rope, interleaved=interleaved, q=q)
    return _choice(pool, refusal, path, target)


def explain_projected(
    pool: Any,
    qkv: Any,
    *,
    rope: tuple[Any, Any],
    scales: Any | None = None,
    interleaved: bool = False,
    path: Wish = "auto",
    target: Target | None = None,
) -> Choice:
    """Return the path that `write_projected` takes, like `explain`."""
    refusal = mosaic.projected_refusal(pool, qkv, rope=rope, scales=scales, interleaved=interleaved)
    return _choice(pool, refusal, path, target)


def _choice(pool: Any, refusal: str | None, path: Wish, target: Target | None) -> Choice:
    least = ADA if pool.dtype == jnp.float8_e4m3fn else AMPERE
    return choose(_OP, path, refusal, least=least, most=HOPPER, target=target)


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
    path: Wish = "auto",
) -> Written:
    """Rotate, quantise and write the keys and values of ``chunk`` tokens per sequence, see `reference` for details.

    In place if the pool and the scales are donated. Raises ValueError if a forced path does not support it.
    """
    options: dict[str, Any] = {"scales": scales, "rope": rope, "interleaved": interleaved, "q": q}
    chosen = explain(pool, k, v, **options, path=path)
    return noted(_OP, chosen.path, mosaic.write, xla.write)(pool, k, v, pages, offsets, **options)


def write_projected(
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    qkv: Float[Array, "sequences chunk kv_heads parts head_dim"],
    pages: Int[Array, "sequences written"],
    offsets: Int[Array, " sequences"],
    *,
    rope: Rope,
    scales: Float[Array, "pages 2 kv_heads *page"] | None = None,
    interleaved: bool = False,
    path: Wish = "auto",
) -> Written:
    """Run `write` on the output of a fused QKV projection, see `reference`: the kernel reads it without a split.

    In place if the pool and the scales are donated. Raises ValueError if a forced path does not support it.
    """
    options: dict[str, Any] = {"rope": rope, "scales": scales, "interleaved": interleaved}
    chosen = explain_projected(pool, qkv, **options, path=path)
    return noted(_OP, chosen.path, mosaic.write_projected, _projected)(pool, qkv, pages, offsets, **options)


def _projected(pool: Any, qkv: Any, pages: Any, offsets: Any, **options: Any) -> Written:
    q, k, v = projected(qkv)
    return xla.write(pool, k, v, pages, offsets, **options, q=q)


def write_rows(
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    pages: Int[Array, " rows"],
    offsets: Int[Array, " rows"],
    *,
    path: Wish = "auto",
) -> Num[Array, "pages 2 kv_heads page head_dim"]:
    """Write one token per row at ``offsets`` within ``pages``; a row whose page is out of range is dropped."""
    return write(pool, k[:, None], v[:, None], pages[:, None], offsets, path=path).pool


def write_pages(
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    k: Float[Array, "sequences chunk kv_heads head_dim"],
    v: Float[Array, "sequences chunk kv_heads head_dim"],
    pages: Int[Array, "sequences written"],
    offsets: Int[Array, " sequences"],
    *,
    path: Wish = "auto",
) -> Num[Array, "pages 2 kv_heads page head_dim"]:
    """Write chunks from slot ``offsets`` of the first of ``pages`` on; a token on a page out of range is dropped.

    ``written`` pages must hold the chunk at every offset that occurs.
    """
    return write(pool, k, v, pages, offsets, path=path).pool


def write_latents(
    pool: Num[Array, "pages page row"],
    latents: Float[Array, "sequences chunk latent"],
    pages: Int[Array, "sequences written"],
    offsets: Int[Array, " sequences"],
) -> Num[Array, "pages page row"]:
    """Write chunks of latents (multi-head latent attention), placed as by `write_pages`; in place under donation.

    If rows of the pool are longer, their remaining columns are kept. Always XLA: a scatter of rows of several hundred
    numbers.
    """
    return xla.write_latents(pool, latents, pages, offsets)


def write_scaled_latents(
    pool: Num[Array, "pages page row"],
    scales: Float[Array, "pages page parts"],
    latents: Float[Array, "sequences chunk latent"],
    pages: Int[Array, "sequences written"],
    offsets: Int[Array, " sequences"],
    *,
    borders: tuple[int, ...],
) -> tuple[Num[Array, "pages page row"], Float[Array, "pages page parts"]]:
    """Run `write_latents` on an int8 or float8 pool; return pool and scales, see `reference.quantize_latents`.

    Raises:
        ValueError: the pool's dtype is not a quantised one.
    """
    return xla.write_scaled_latents(pool, scales, latents, pages, offsets, borders=borders)
