"""Recurrences against their definitions, at any length, with gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.recurrent import linear_recurrence, recur, short_conv
from jaxinfer.types import StateSpec
from pallas_kernels.linear_attention import reference

CONV, DELTA = StateSpec((2, 5, 3)), StateSpec((4, 8, 6), exact=True)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("length", [1, 3, 64, 67])
@pytest.mark.parametrize("biased", [True, False])
def test_a_short_convolution_is_causal_and_has_its_taps(length, biased):
    x, weight = normal(0, length, 2, 5), normal(1, 2, 5, 4)
    bias = normal(2, 2, 5) if biased else None
    out, _ = recur(None, short_conv(weight, bias), x, None, CONV, (length,), x.dtype)
    wide, taps = np.asarray(x, np.float64).reshape(length, 10), np.asarray(weight, np.float64).reshape(10, 4)
    want = np.stack([np.convolve(wide[:, c], taps[c, ::-1])[:length] for c in range(10)], -1).reshape(length, 2, 5)
    np.testing.assert_allclose(out, want if bias is None else want + bias, atol=1e-5)


@pytest.mark.parametrize("length", [1, 63, 130])
@pytest.mark.parametrize("replaces", [True, False])
def test_linear_attention_is_the_recurrence_of_its_heads(length, replaces):
    q, k, v = normal(0, 3, length, 2, 8), normal(1, 3, length, 2, 8) / 4, normal(2, 3, length, 4, 6)
    decay, beta = -jnp.abs(normal(3, 3, length, 4)), jax.nn.sigmoid(normal(4, 3, length, 4))
    inputs = (q, k, v, decay, beta) if replaces else (q, k, v, decay)
    out, _ = recur(None, linear_recurrence, inputs, None, DELTA, (3, length), q.dtype)
    heads = (jnp.repeat(x, 2, axis=2) for x in (q, k))
    want, _ = reference.scan(*heads, v, decay, beta if replaces else None, jnp.zeros((3, 4, 8, 6)))
    np.testing.assert_allclose(out, want, atol=2e-5)


def test_gradients_reach_what_came_long_before():
    q, k, v = normal(0, 100, 2, 8), normal(1, 100, 2, 8) / 4, normal(2, 100, 4, 6)

    def last(v: jax.Array) -> jax.Array:
        gates = jnp.full((100, 4), -0.01), jnp.full((100, 4), 0.5)
        out, _ = recur(None, linear_recurrence, (q, k, v, *gates), None, DELTA, (100,), q.dtype)
        return out[-1].sum()

    gradient = jax.grad(last)(v)
    assert bool(jnp.isfinite(gradient).all())
    assert float(jnp.abs(gradient[0]).max()) > 0
