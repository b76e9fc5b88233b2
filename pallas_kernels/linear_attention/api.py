"""The doors of linear_attention: Mosaic kernels on Ampere, Ada and Hopper GPUs, plain XLA everywhere else.

`step` and `chunks` are functions of states that are their arguments: always XLA's, and differentiable. `decode` and
`prefill` go on from states in a pool, in place; these have the kernels.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.choice import AMPERE, HOPPER, Choice, Target, Wish, choose
from pallas_kernels.launches import noted
from pallas_kernels.linear_attention import xla
from pallas_kernels.linear_attention.mosaic import decode as decode_kernel
from pallas_kernels.linear_attention.mosaic import prefill as prefill_kernel

__all__ = ["SIZE", "chunks", "decode", "explain", "prefill", "step"]

_OP = "linear_attention"
SIZE = 64  # tokens of a chunk, if no other number is asked for


def step(
    q: Float[Array, "rows heads key"],
    k: Float[Array, "rows heads key"],
    v: Float[Array, "rows heads value"],
    decay: Float[Array, "rows heads"],
    beta: Float[Array, "rows heads"] | None = None,
    *,
    state: Float[Array, "rows heads key value"],
) -> tuple[Float[Array, "rows heads value"], Float[Array, "rows heads key value"]]:
    """One token of each row: the outputs, and the states after them; see `reference`. All in float32.

    Args:
        decay: logarithms of what the state is multiplied with, at most 0.
        beta: how much of what the state has under a key is replaced; None: what comes is added.
    """
    return xla.step(q, k, v, decay, beta, state)


def chunks(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time heads value"],
    decay: Float[Array, "batch time heads"],
    beta: Float[Array, "batch time heads"] | None = None,
    *,
    state: Float[Array, "batch heads key value"],
    size: int,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch chunks heads key value"]]:
    """Many tokens of each sequence: all outputs, and the state after each chunk of ``size`` tokens; as `step`.

    A token of zeros (its decay and beta, too) changes no state. ``size`` is a power of two, ``time`` a multiple of it.
    """
    return xla.chunks(q, k, v, decay, beta, state, size)


def explain(
    q: Any,
    k: Any,
    v: Any,
    decay: Any,
    beta: Any,
    pool: Any,
    read: Any,
    write: Any,
    *,
    path: Wish = "auto",
    target: Target | None = None,
) -> Choice:
    """The path that `decode` (of values [rows, heads, value]) or `prefill` (of a time axis, too) takes, and why.

    Args:
        path: "mosaic" and "xla" force one.
        target: what the program is lowered for; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: a kernel is forced and cannot do these operands.
    """
    kernel = decode_kernel if v.ndim == 3 else prefill_kernel
    why = kernel.refusal(q, k, v, decay, beta, pool, read, write)
    return choose(_OP, path, why, least=AMPERE, most=HOPPER, target=target)


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
    path: Wish = "auto",
) -> tuple[Float[Array, "rows heads value"], Float[Array, "states heads key value"]]:
    """One token of each row, on states in a pool: the outputs in float32, and the pool, in place where it is donated.

    Row r goes on from state ``read[r]`` (beyond the pool: from zeros) and leaves its own in ``write[r]`` (beyond the
    pool: nowhere), which may be the same. No row may write what another one reads or writes. Queries, keys and values
    of any float dtype, gates in float32; as many heads of values as of queries, or a multiple; see `step`.

    Raises:
        ValueError: a forced ``path`` cannot do it.
    """
    chosen = explain(q, k, v, decay, beta, pool, read, write, path=path)
    run = noted(_OP, chosen.path, decode_kernel.decode, xla.decode)
    outs, states = run(q, k, v, decay, beta, pool, read, write)
    return outs, states


def prefill(
    q: Float[Array, "batch time k_heads key"],
    k: Float[Array, "batch time k_heads key"],
    v: Float[Array, "batch time heads value"],
    decay: Float[Array, "batch time heads"],
    beta: Float[Array, "batch time heads"] | None,
    pool: Float[Array, "states heads key value"],
    read: Int[Array, " batch"],
    write: Int[Array, "batch chunks"],
    size: int = SIZE,
    *,
    path: Wish = "auto",
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "states heads key value"]]:
    """Many tokens of each sequence, on states in a pool; as `decode`.

    Args:
        write: where the state after each chunk of ``size`` tokens goes; beyond the pool: nowhere.
        size: a power of two from 16 on; ``time`` is a multiple of it. Fill up with tokens of zeros, gates included:
            they change no bit of a state.

    Raises:
        ValueError: ``size`` and the shapes do not fit, or a forced ``path`` cannot do it.
    """
    if size < 16 or size & (size - 1) or write.shape != (v.shape[0], v.shape[1] // size) or v.shape[1] % size:
        raise ValueError(f"size {size}: {v.shape[1]} tokens in chunks of a power of two from 16, states {write.shape}")
    chosen = explain(q, k, v, decay, beta, pool, read, write, path=path)
    run = noted(_OP, chosen.path, prefill_kernel.prefill, xla.prefill)
    outs, states = run(q, k, v, decay, beta, pool, read, write)
    return outs, states
