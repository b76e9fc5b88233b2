"""Arithmetic shared by decode and prefill for Hopper GPUs, so that a position is bitwise identical in both.

1. A score, in powers of two, is rounded once, to a multiple of ``2**-14``: its distance from any integer that can
matter is then exact.
2. Probabilities are relative to an integer. Any integer will do: another scales them, and all sums, exactly.
3. The probabilities' sum is a product with ones, like that of the values: a tensor core adds over the keys in order,
whichever operand is on the left.
4. Keys are in order, and sums restart at each absolute multiple of a split's keys; the splits' sums are added up in
order, and sinks at the end.

A probability below 2**-14 loses bits in float16, so that there point 2 holds except for those. In bfloat16 it holds.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # represents minus infinity where inf - inf would give NaN
GRID = 2.0**-14
_LIFT = 1.5 * 2**9  # added to a float32 below 256, it leaves multiples of the grid
_ROUND = 1.5 * 2**23  # added and subtracted, it rounds a float32 to the nearest integer


def lifted(scores: Any, factor: float) -> Any:
    """Return scores times ``factor`` on the grid, plus a constant, which `probabilities` subtracts with the maximum."""
    return scores * factor + _LIFT


def capped(scores: Any, scale: float, cap: float) -> tuple[Any, float]:
    """Return scores under a soft cap, and their factor. By the hardware's exp2, to 2**-22: its tanh is to 2**-11."""
    powers = jnp.exp2(scores * (2 * LOG2_E * scale / cap))
    return 1.0 - 2.0 / (1.0 + powers), cap * LOG2_E


def integer(x: Any) -> Any:
    """Return the nearest integer, as a float32."""
    return (x + _ROUND) - _ROUND


def integer_top(largest: Any) -> Any:
    """Return the integer nearest to the largest of `lifted` scores."""
    return integer(largest - _LIFT)


def probabilities(scores: Any, spread_top: Any) -> Any:
    """Return two to the power of `lifted` scores less ``spread_top``, the maximum of each."""
    return jnp.exp2(scores - spread_top)


def lifted_top(top: Any) -> Any:
    """Return the number that `probabilities` subtracts for a maximum."""
    return top + _LIFT


def sink_levels(sinks: Float[Array, " heads"]) -> Float[Array, " heads"]:
    """Return sinks in powers of two, on the scores' grid."""
    levels = jnp.maximum(sinks.astype(jnp.float32) * LOG2_E, LOWEST)
    return jnp.where(jnp.abs(levels) < 256, jnp.round(levels / GRID) * GRID, levels)
