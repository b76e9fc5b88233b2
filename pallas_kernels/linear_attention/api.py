"""API of linear_attention: Mosaic kernels on Ampere, Ada and Hopper GPUs, XLA everywhere else.

`step` and `chunks` take states as arguments and return them: always XLA, and differentiable. `decode` and `prefill`
continue from states in a pool, in place; these have the kernels.
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
SIZE = 64  # default number of tokens in a chunk


def step(
    q: Float[Array, "rows heads key"],
    k: Float[Array, "rows heads key"],
    v: Float[Array, "rows heads value"],
    decay: Float[Array, "rows heads"],
    beta: Float[Array, "rows heads"] | None = None,
    *,
    state: Float[Array, "rows heads key value"],
) -> tuple[Float[Array, "rows heads value"], Float[Array, "rows heads key value"]]:
    """Process one token of each row: return the outputs, and the states after them; see `reference`. All in float32.

    Args:
        decay: logarithms of the factors of the state, at most 0.
        beta: fraction of the state's value under a key that is replaced; None: the new value is added.
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
    """Process many tokens of each sequence: return all outputs, and the state after each chunk; as `step`.

    A token of zeros (also decay and beta) changes no state. ``size`` is a power of two, ``time`` a multiple of it.
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
    """Return the path of `decode` (values [rows, heads, value]) or `prefill` (with a time axis), and why.

    Args:
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: a kernel is forced and does not support these operands.
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
    """Process one token of each row, on states in a pool: return float32 outputs, and the pool, in place if donated.

    Row r continues from state ``read[r]`` (out of range: from zeros) and writes its state to ``write[r]`` (out of
    range: dropped), which may be the same. No row may write a state that another row reads or writes. Queries, keys and
    values of any float dtype, gates in float32; as many heads of values as of queries, or a multiple; see `step`.

    Raises:
        ValueError: a forced ``path`` does not support it.
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
    """Process many tokens of each sequence, on states in a pool; as `decode`.

    Args:
        write: target of the state after each chunk of ``size`` tokens; out of range: dropped.
        size: a power of two from 16 on; ``time`` is a multiple of it. Pad with tokens of zeros, gates included:
            they leave a state bitwise unchanged.

    Raises:
        ValueError: ``size`` and the shapes do not fit, or a forced ``path`` does not support it.
    """
    if size < 16 or size & (size - 1) or write.shape != (v.shape[0], v.shape[1] // size) or v.shape[1] % size:
        raise ValueError(f"size {size}: {v.shape[1]} tokens in chunks of a power of two from 16, states {write.shape}")
    chosen = explain(q, k, v, decay, beta, pool, read, write, path=path)
    run = noted(_OP, chosen.path, prefill_kernel.prefill, xla.prefill)
    outs, states = run(q, k, v, decay, beta, pool, read, write)
    return outs, states
