"""Tokens rounded to 8 bits in plain XLA, with divisions that are rounded correctly."""

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
    """``x / by``, correctly rounded. XLA would multiply with the reciprocal of what is broadcast; a token's largest
    number lies on the border of two integers, and a last bit decides which one it becomes."""
    return x / lax.optimization_barrier(jnp.broadcast_to(by, x.shape))
