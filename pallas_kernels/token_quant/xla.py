"""Per-token quantisation to 8 bits in XLA, with correctly rounded divisions."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from pallas_kernels.token_quant.reference import Rule


def quantize(x: Float[Array, "rows k"], rule: Rule) -> tuple[Num[Array, "rows k"], Float[Array, " rows"]]:
    """See `reference.quantize`."""
    numbers = x.astype(jnp.float32)
    scales = quotient(rule.divided(jnp.abs(numbers).max(-1)), jnp.full((), rule.most, jnp.float32))
    return rule.codes(quotient(numbers, scales[:, None])), scales


def quotient(x: Float[Array, "*shape"], by: Float[Array, "..."]) -> Float[Array, "*shape"]:
    """Return ``x / by``, correctly rounded. XLA would multiply by the reciprocal of a broadcast divisor; a token's
    largest number is at the border of two integers, where the last bit decides."""
    return x / lax.optimization_barrier(jnp.broadcast_to(by, x.shape))
