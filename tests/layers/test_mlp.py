"""Activations against float64: errors are relative to the result, however small."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.mlp import ACTIVATIONS

X = np.concatenate([np.linspace(-12.0, 12.0, 20_001), [-40.0, -1e-6, 1e-30, 0.0, 40.0, 3e4, -3e4]]).astype(np.float32)


def gelu_tanh(x: float) -> float:
    u = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    return x / (1.0 + math.exp(-2.0 * u)) if u > -300.0 else 0.0


def silu(x: float) -> float:
    return x / (1.0 + math.exp(-x)) if x > -600.0 else 0.0


def quick_gelu(x: float) -> float:
    return x / (1.0 + math.exp(-1.702 * x)) if x > -400.0 else 0.0


EXACT = {
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2.0)),
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": silu,
    "swish": silu,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_small_results_have_small_errors(name: str) -> None:
    """A sum like 1 + tanh(u) would have an error of 6e-8 of 1 where 1e-6 of the result is allowed."""
    x = X[np.abs(X) < 6.0]
    want = np.array([EXACT[name](float(each)) for each in x])
    got = np.asarray(jax.jit(ACTIVATIONS[name])(jnp.asarray(x)), np.float64)
    assert (np.abs(got - want) <= 8e-6 * np.abs(want) + 1e-37).all()


def test_far_from_zero_there_are_no_surprises() -> None:
    for name, function in ACTIVATIONS.items():
        got = np.asarray(function(jnp.asarray([-3e4, -40.0, 40.0, 3e4])))
        np.testing.assert_allclose(got, [EXACT[name](x) for x in (-3e4, -40.0, 40.0, 3e4)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_numbers(name: str) -> None:
    grads = jax.vmap(jax.grad(ACTIVATIONS[name]))(jnp.asarray(X))
    assert np.isfinite(np.asarray(grads)).all()
