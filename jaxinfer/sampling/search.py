"""Exact top-k and top-p thresholds without a sort: bisection on integers with the order of float32.

The k-th largest of V values, or the boundary of the nucleus, is the largest threshold whose kept values still suffice.
Floats have at most 2**32 values, so 32 halvings find it exactly; a row is done as soon as all remaining thresholds keep
the same values. A halving is one pass over the vocabulary; a sort costs a thousand.

A GPU quarters instead, a fixed number of times: for a loop with an early exit the host must read the condition, and can
launch nothing until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer.sampling.reductions import LANES, Lanes, count, total
from pallas_kernels.choice import lowering_target

Row = Float32[Array, " rows"]
_QUARTERINGS = 16  # 4**16 = 2**32


def kth_largest(values: Lanes, k: Int32[Array, " rows"], on: Bool[Array, " rows"]) -> Row:
    """Return the k-th largest value of each row that is ``on``, else -inf: ``values >= it`` keeps k, or more in a tie.

    Args:
        values: padded with -inf.
        k: at least 1.
    """
    wanted = k.astype(jnp.float32)
    peaks = jnp.max(values, axis=1)
    bounds = _Bounds(
        # Each lane has a value that is at least the least of their peaks: this bound keeps LANES of them.
        low=_order(jnp.where(k <= LANES, jnp.min(peaks, axis=-1), -jnp.inf)),
        high=_order(jnp.max(peaks, axis=-1)) + 1,
        at_low=jnp.full(k.shape, jnp.inf),
        at_high=jnp.zeros(k.shape),
    )
    found = _bisect(
        bounds,
        kept=lambda threshold: count(values >= threshold[:, None, None]),
        wanted=wanted,
        done=lambda now: ~on | (now.at_low == wanted),
    )
    return jnp.where(on, found, -jnp.inf)


def nucleus_floor(weights: Lanes, top_p: Row, on: Bool[Array, " rows"]) -> Row:
    """Return the smallest weight in the nucleus of each row that is ``on``, else 0 (Holtzman et al. 2020).

    The nucleus is the fewest largest weights whose sum is at least ``top_p`` of the row's sum; weights that tie with
    the smallest of them are in it too.

    Args:
        weights: at least 0, at most 1, padded with 0.
    """
    whole, elements = total(weights), weights[0].size
    # All weights below this bound sum to less than the mass to cut, by a factor of 2 for rounding.
    low = (1 - top_p) * whole / (2 * elements)
    bounds = _Bounds(
        low=_order(low),
        high=jnp.full(top_p.shape, _order(jnp.float32(1)) + 1),
        at_low=whole,
        at_high=jnp.zeros_like(whole),
    )
    rounding = (weights.shape[1] + LANES) * 2.0**-24

    def one_left(now: _Bounds) -> Bool[Array, " rows"]:
        """Whether the mass between the bounds is below twice the smallest weight that could be there."""
        between = now.at_low - now.at_high + 2 * rounding * now.at_low
        return ~on | (between < 2 * _float(now.low))

    found = _bisect(
        bounds,
        kept=lambda floor: total(jnp.where(weights >= floor[:, None, None], weights, 0)),
        wanted=jnp.maximum(top_p * whole, jnp.finfo(jnp.float32).tiny),
        done=one_left,
    )
    return jnp.where(on, found, 0)


class _Bounds(NamedTuple):
    """Thresholds as ordered integers (``low`` keeps enough, ``high`` too little), and the amount that each keeps."""

    low: Int32[Array, " rows"]
    high: Int32[Array, " rows"]
    at_low: Row
    at_high: Row


def _bisect(
    bounds: _Bounds, *, kept: Callable[[Row], Row], wanted: Row, done: Callable[[_Bounds], Bool[Array, " rows"]]
) -> Row:
    """Return the largest threshold that keeps at least ``wanted``. ``kept`` falls as the threshold grows."""
    if lowering_target().platform != "cpu":
        return _float(_quartered(bounds.low, bounds.high, lambda threshold: kept(_float(threshold)) >= wanted))

    def halve(now: _Bounds) -> _Bounds:
        middle = (now.low & now.high) + ((now.low ^ now.high) >> 1)
        amount = kept(_float(middle))
        enough = amount >= wanted
        low, at_low = jnp.where(enough, middle, now.low), jnp.where(enough, amount, now.at_low)
        high, at_high = jnp.where(enough, now.high, middle), jnp.where(enough, now.at_high, amount)
        return _Bounds(low, high, at_low, at_high)

    def unfinished(now: _Bounds) -> Bool[Array, ""]:
        return jnp.any(~done(now) & (now.low + 1 < now.high))

    return _float(lax.while_loop(unfinished, halve, bounds).low)


def _quartered(
    low: Int32[Array, " rows"],
    high: Int32[Array, " rows"],
    suffices: Callable[[Int32[Array, " rows"]], Bool[Array, " rows"]],
) -> Int32[Array, " rows"]:
    """Return the largest threshold that ``suffices``: ``low`` does, ``high`` does not.

    XLA tries the three thresholds of a pass in one read of the vocabulary. Where halving exits early, its threshold
    differs but keeps the same values.
    """
    for _ in range(_QUARTERINGS):
        # The distance may have 32 bits; a quarter of it, rounded up, has 31.
        quarter = lax.bitcast_convert_type(high - low, jnp.uint32)
        quarter = lax.bitcast_convert_type(quarter // 4 + (quarter % 4 > 0), jnp.int32)
        thresholds = [jnp.minimum(low + part * quarter, high) for part in (1, 2, 3)]
        passed = sum(((at < high) & suffices(at)).astype(jnp.int32) for at in thresholds)
        low = low + passed * quarter
        high = jnp.minimum(high, low + quarter)
    return low


def _order(value: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Map floats to integers of the same order."""
    return _flip(lax.bitcast_convert_type(value, jnp.int32))


def _float(order: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return lax.bitcast_convert_type(_flip(order), jnp.float32)


def _flip(bits: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
