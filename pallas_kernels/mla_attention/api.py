"""API of MLA: a Mosaic kernel on Hopper GPUs, XLA everywhere else."""

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
    """Return the path of `decode`, `extend` and `prefill` for operands of these shapes and dtypes, and why.

    Args:
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: the kernel is forced and does not support these operands.
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
    """See `reference.decode`. Raises ValueError if a forced ``path`` does not support the operands."""
    if explain(q, pool, tables, lengths, options, path=path).path == "mosaic":
        note(_OP, attention.decode, xla.decode, q, pool, tables, lengths, options)
        return attention.decode(q, pool, tables, lengths, options)
    # A GPU has memory for all rows at once, and every step of a loop adds latency.
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
    """Run `prefill` of a few queries per sequence (decode of several tokens): a kernel splits the keys."""
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
    """See `reference.prefill`; results of padding queries are finite and meaningless.

    Raises ValueError if a forced ``path`` does not support the operands.
    """
    chosen = explain(q, pool, tables, lengths, options, path=path)
    run = noted(_OP, chosen.path, attention.prefill, xla.prefill)
    return run(q, pool, tables, starts, lengths, options)
