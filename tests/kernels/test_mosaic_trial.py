"""The startup trial of the GEMM kernel (`jaxinfer.quant.gemm_selftest`), interpreted."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.quant import gemm_selftest
from pallas_kernels import compat
from pallas_kernels.matmul import Extras
from pallas_kernels.matmul.mosaic import launch

QKV, GATE_UP = (
    gemm_selftest.Product((128, 3, 64), "in first", False),
    gemm_selftest.Product((2, 64, 128), "in last", True),
)
FP8 = gemm_selftest.Product((2, 64, 256), "in last", True, "float8_e4m3fn")


@pytest.mark.parametrize("product", [pytest.param(QKV, marks=pytest.mark.slow), GATE_UP, FP8])
def test_the_kernel_passes(monkeypatch, product) -> None:
    """A constant clock never shows the kernel as slower."""
    monkeypatch.setattr(gemm_selftest, "_ROUNDS", 1)
    monkeypatch.setattr(gemm_selftest, "_CALLS", 1)

    def kernel(product: gemm_selftest.Product, operands: gemm_selftest.Operands, dtype: object) -> jax.Array:
        extras = Extras(x_scales=operands.x_scales, scales=operands.scales)
        given = {"layout": product.layout, "gated": product.gated, "dtype": dtype}
        return launch.matmul(operands.x, operands.weights, extras, **given, interpret=compat.interpret_params())

    tried = gemm_selftest.Trial({product: 1}, (3, 70), jnp.bfloat16, jax.devices()[0], kernel, clock=lambda: 0.0)
    assert compat.interpreted(tried.fault) is None
