"""The doors of paged attention: Mosaic kernels on Hopper GPUs, others on Ampere's and Ada's, plain XLA elsewhere."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.choice import ADA, AMPERE, HOPPER, Choice, Target, Wish, choose, lowering_target
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.mosaic import ampere
from pallas_kernels.paged_attention.mosaic import decode as few
from pallas_kernels.paged_attention.mosaic import prefill as many


def explain_decode(
    q: Any, pool: Any, tables: Any, lengths: Any, *, path: Wish = "auto", target: Target | None = None, **options: Any
) -> Choice:
    """The path that `decode` takes for operands of these shapes and dtypes, and why.

    Args:
        path: "mosaic" and "xla" force one.
        target: what the program is lowered for; None: see `pallas_kernels.choice`.
        options: those of `decode`.

    Raises:
        ValueError: the kernel is forced and cannot do these operands.
    """
    options.pop("scale", None)
    if _below_hopper(target):
        return choose(path, ampere.refusal(q, pool, tables, lengths, **options), least=AMPERE, most=ADA, target=target)
    return choose(path, few.refusal(q, pool, tables, lengths, **options), target=target)


def _below_hopper(target: Target | None) -> bool:
    capability = (target or lowering_target()).capability
    return capability is not None and AMPERE <= capability < HOPPER


def explain_prefill(
    q: Any,
    pool: Any,
    tables: Any,
    starts: Any,
    lengths: Any,
    *,
    path: Wish = "auto",
    target: Target | None = None,
    **options: Any,
) -> Choice:
    """The path that `prefill` takes, like `explain_decode`. Few queries to a KV head are the decode kernel's."""
    if _below_hopper(target):
        why = _refusal(ampere, q, pool, tables, starts, lengths, options)
        return choose(path, why, least=AMPERE, most=ADA, target=target)
    if _refusal(few, q, pool, tables, starts, lengths, options) is None:
        return choose(path, None, target=target)
    return choose(path, many.refusal(q, pool, tables, starts, lengths, **options), target=target)


def _refusal(
    kernel: Any, q: Any, pool: Any, tables: Any, starts: Any, lengths: Any, options: dict[str, Any]
) -> str | None:
    """Of a kernel that takes decode's operands, too."""
    rest = {name: value for name, value in options.items() if name != "scale"}
    why: str | None = kernel.refusal(q, pool, tables, lengths, starts=starts, **rest)
    return why


def decode(
    q: Float[Array, "rows heads head_dim"],
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    scales: Float[Array, "pages 2 kv_heads *page"] | None = None,
    path: Wish = "auto",
) -> Float[Array, "rows heads head_dim"]:
    """See `reference.decode`. Raises ValueError where a forced ``path`` cannot do it."""
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "scales": scales}
    if explain_decode(q, pool, tables, lengths, **options, path=path).path == "mosaic":
        kernel = ampere if _below_hopper(None) else few
        return kernel.decode(q, pool, tables, lengths, **options)
    # A GPU has room for all rows at once, and waits for every step of a loop.
    together = q.shape[0] if lowering_target().platform in ("gpu", "cuda") else xla.ROWS_TOGETHER
    return xla.decode(q, pool, tables, lengths, **options, together=together)


def prefill(
    q: Float[Array, "sequences chunk heads head_dim"],
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    scales: Float[Array, "pages 2 kv_heads *page"] | None = None,
    tree: Bool[Array, "sequences chunk chunk"] | None = None,
    path: Wish = "auto",
) -> Float[Array, "sequences chunk heads head_dim"]:
    """See `reference.prefill`; what padding queries give is finite and means nothing.

    Raises ValueError where a forced ``path`` cannot do it.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "scales": scales}
    options["tree"] = tree
    if explain_prefill(q, pool, tables, starts, lengths, **options, path=path).path == "xla":
        return xla.prefill(q, pool, tables, starts, lengths, **options)
    if _below_hopper(None):
        return ampere.extend(q, pool, tables, starts, lengths, **options)
    kernel = many.prefill if _refusal(few, q, pool, tables, starts, lengths, options) else few.extend
    return kernel(q, pool, tables, starts, lengths, **options)
