"""API of paged attention: a kernel for the GPU's generation if there is one, else XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, Num

from pallas_kernels.choice import ADA, AMPERE, HOPPER, Capability, Choice, Target, Wish, choose, lowering_target
from pallas_kernels.launches import note
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.ampere import launch as ampere
from pallas_kernels.paged_attention.hopper.decode import launch as hopper_decode
from pallas_kernels.paged_attention.hopper.prefill import launch as hopper_prefill
from pallas_kernels.paged_attention.options import AttentionOptions


class Kernel(NamedTuple):
    """An implementation of an operation for some GPUs.

    Attributes:
        run: takes the operation's operands and `AttentionOptions`.
        refusal: takes the operands as a tuple, of which it reads shapes and dtypes, and the options. Returns why the
            kernel does not support them, in a sentence; None if it does.
        least: the lowest compute capability that it was written for.
        most: the highest one.
    """

    run: Callable[..., Array]
    refusal: Callable[[tuple[Any, ...], AttentionOptions], str | None]
    least: Capability = HOPPER
    most: Capability = HOPPER


_OP = "paged_attention."
# By operation, in order: the first kernel that accepts the operands runs, else XLA. Prefills with few queries per KV
# head use the decode kernel.
IMPLEMENTATIONS: dict[str, tuple[Kernel, ...]] = {
    "decode": (
        Kernel(hopper_decode.decode, hopper_decode.refusal),
        Kernel(ampere.decode, ampere.refusal, AMPERE, ADA),
    ),
    "prefill": (
        Kernel(hopper_decode.extend, hopper_decode.refusal),
        Kernel(hopper_prefill.prefill, hopper_prefill.refusal),
        Kernel(ampere.extend, ampere.refusal, AMPERE, ADA),
    ),
}


def explain_decode(
    q: Any,
    pool: Any,
    tables: Any,
    lengths: Any,
    options: AttentionOptions,
    *,
    path: Wish = "auto",
    target: Target | None = None,
) -> Choice:
    """Return the path that `decode` takes for operands of these shapes and dtypes, and why.

    Args:
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: a kernel is forced and none supports these operands.
    """
    return _chosen("decode", (q, pool, tables, lengths), options, path, target)[0]


def explain_prefill(
    q: Any,
    pool: Any,
    tables: Any,
    starts: Any,
    lengths: Any,
    options: AttentionOptions,
    *,
    path: Wish = "auto",
    target: Target | None = None,
) -> Choice:
    """Return the path that `prefill` takes, like `explain_decode`."""
    return _chosen("prefill", (q, pool, tables, starts, lengths), options, path, target)[0]


def _chosen(
    operation: str, operands: tuple[Any, ...], options: AttentionOptions, path: Wish, target: Target | None = None
) -> tuple[Choice, Callable[..., Array] | None]:
    """Return the path, and its kernel; None: XLA."""
    kernels, refusals = _kernels(operation, target or lowering_target()), list[str]()
    best = kernels[0]
    choice = functools.partial(choose, _OP + operation, path, least=best.least, most=best.most, target=target)
    for kernel in kernels:
        if (why := kernel.refusal(operands, options)) is None:
            done = choice(None)
            return done, kernel.run if done.path == "mosaic" else None
        refusals.append(why)
    return choice("; ".join(dict.fromkeys(refusals))), None


def _kernels(operation: str, target: Target) -> list[Kernel]:
    """Return the kernels of the target's generation; if it has none, Hopper's: they run if a path is forced."""
    every, capability = IMPLEMENTATIONS[operation], target.capability
    own = [kernel for kernel in every if capability is not None and kernel.least <= capability <= kernel.most]
    return own or [kernel for kernel in every if kernel.least == HOPPER]


def decode(
    q: Float[Array, "rows heads head_dim"],
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    options: AttentionOptions,
    *,
    path: Wish = "auto",
) -> Float[Array, "rows heads head_dim"]:
    """See `reference.decode`. Raises ValueError if a forced ``path`` does not support the operands."""
    operands = (q, pool, tables, lengths)
    _, kernel = _chosen("decode", operands, options, path)
    if kernel is not None:
        note(_OP + "decode", kernel, xla.decode, *operands, options)
        return kernel(*operands, options)
    # A GPU has memory for all rows at once, and every step of a loop adds latency.
    together = q.shape[0] if lowering_target().platform in ("gpu", "cuda") else xla.ROWS_TOGETHER
    return xla.decode(*operands, options, together=together)


def prefill(
    q: Float[Array, "sequences chunk heads head_dim"],
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    options: AttentionOptions,
    *,
    path: Wish = "auto",
) -> Float[Array, "sequences chunk heads head_dim"]:
    """See `reference.prefill`; results of padding queries are finite and meaningless.

    Raises ValueError if a forced ``path`` does not support the operands.
    """
    operands = (q, pool, tables, starts, lengths)
    _, kernel = _chosen("prefill", operands, options, path)
    if kernel is not None:
        note(_OP + "prefill", kernel, xla.prefill, *operands, options)
    return (kernel or xla.prefill)(*operands, options)
