"""The doors of MLA: a Mosaic kernel on Hopper GPUs, plain XLA everywhere else."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int, Num

from pallas_kernels.choice import Choice, Target, Wish, choose, lowering_target
from pallas_kernels.launches import note, noted
from pallas_kernels.mla_attention import xla
from pallas_kernels.mla_attention.mosaic import attention
from pallas_kernels.mla_attention.options import LatentOptions

_OP = "mla_attention"


def explain(
    q: Any,
    pool: Any,
    tables: Any,
    lengths: Any,
    options: LatentOptions,
    *,
    path: Wish = "auto",
    target: Target | None = None,
) -> Choice:
    """The path that `decode`, `extend` and `prefill` take for operands of these shapes and dtypes, and why.

    Args:
        path: "mosaic" and "xla" force one.
        target: what the program is lowered for; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: the kernel is forced and cannot do these operands.
    """
    return choose(_OP, path, attention.refusal((q, pool, tables, lengths), options), target=target)


def decode(
    q: Float[Array, "rows heads latent"],
    pool: Num[Array, "pages page row"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    options: LatentOptions,
    *,
    path: Wish = "auto",
) -> Float[Array, "rows heads rank"]:
    """See `reference.decode`. Raises ValueError where a forced ``path`` cannot do it."""
    if explain(q, pool, tables, lengths, options, path=path).path == "mosaic":
        note(_OP, attention.decode, xla.decode, q, pool, tables, lengths, options)
        return attention.decode(q, pool, tables, lengths, options)
    # A GPU has room for all rows at once, and waits for every step of a loop.
    together = q.shape[0] if lowering_target().platform in ("gpu", "cuda") else xla.ROWS_TOGETHER
    return xla.decode(q, pool, tables, lengths, options, together=together)


def extend(
    q: Float[Array, "sequences chunk heads latent"],
    pool: Num[Array, "pages page row"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    options: LatentOptions,
    *,
    path: Wish = "auto",
) -> Float[Array, "sequences chunk heads rank"]:
    """`prefill` of a few queries a sequence (decode of several tokens): where a kernel does it, it splits the keys."""
    chosen = explain(q, pool, tables, lengths, options, path=path)
    run = noted(_OP, chosen.path, attention.extend, xla.prefill)
    return run(q, pool, tables, starts, lengths, options)


def prefill(
    q: Float[Array, "sequences chunk heads latent"],
    pool: Num[Array, "pages page row"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    options: LatentOptions,
    *,
    path: Wish = "auto",
) -> Float[Array, "sequences chunk heads rank"]:
    """See `reference.prefill`; what padding queries give is finite and means nothing.

    Raises ValueError where a forced ``path`` cannot do it.
    """
    chosen = explain(q, pool, tables, lengths, options, path=path)
    run = noted(_OP, chosen.path, attention.prefill, xla.prefill)
    return run(q, pool, tables, starts, lengths, options)
