"""The trial that a start makes of the GEMM kernel (`jaxinfer.quant.trial`), with the kernel itself, interpreted."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.quant import trial
from pallas_kernels import compat
from pallas_kernels.matmul.mosaic import launch

QKV, GATE_UP = trial.Product((128, 3, 64), "in first", False), trial.Product((2, 64, 128), "in last", True)


@pytest.mark.parametrize("product", [pytest.param(QKV, marks=pytest.mark.slow), GATE_UP])
def test_the_kernel_passes(monkeypatch, product) -> None:
    """A clock that stands still calls nobody slower."""
    monkeypatch.setattr(trial, "_ROUNDS", 1)
    monkeypatch.setattr(trial, "_CALLS", 1)

    def kernel(product: trial.Product, x: jax.Array, weights: jax.Array, dtype: object) -> jax.Array:
        given = {"layout": product.layout, "gated": product.gated, "dtype": dtype}
        return launch.matmul(x, weights, **given, interpret=compat.interpret_params())

    tried = trial.Trial({product: 1}, (3, 70), jnp.bfloat16, jax.devices()[0], kernel, clock=lambda: 0.0)
    assert compat.interpreted(tried.fault) is None
