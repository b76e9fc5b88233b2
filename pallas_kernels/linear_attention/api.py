"""The doors of linear_attention."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.linear_attention import xla

__all__ = ["chunks", "step"]


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
