"""float16 matmuls on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import float16, sums
from pallas_kernels.choice import HOPPER, Target
from tests.kernels.test_one_row import exact, operands

# Inputs and outputs: one slice; several, with overlapping output slices; inputs that no slice size divides.
SHAPES = ((64, (40,)), (1024, (2, 411)), (640, (900,)), (1999, (300,)))


@pytest.mark.parametrize("rows", [(2,), (2, 3)])
@pytest.mark.parametrize("along", [0, -1])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_products_are_rounded_once(along, inputs, outputs, rows):
    x, weights = operands("float16", along, inputs, outputs, rows)
    last = along and weights.ndim - 1
    found, expected = jax.jit(functools.partial(float16.dot, along=last))(x, weights), exact(x, weights, along)
    assert (found.dtype, found.shape) == (jnp.float32, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    assert sums.dot(x, weights, last).dtype == jnp.float16
    np.testing.assert_array_equal(
        jax.jit(functools.partial(sums.dot, along=last, dtype=jnp.float32))(x, weights), found
    )


@pytest.mark.parametrize("along", [0, 1])
def test_pieces_alone_are_widened(along):
    x, weights = operands("float16", along, 1024, (4096,), (8,))
    compiled = jax.jit(functools.partial(sums.dot, along=along)).lower(x, weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= weights.nbytes


@pytest.mark.parametrize("along", [0, 1])
def test_a_gradient_is_that_of_a_product(along, monkeypatch):
    monkeypatch.setattr(float16, "_PIECE", 1 << 11)
    x, weights = operands("float16", along, 320, (37,), (3,))
    factor = jnp.cos(jnp.arange(37.0))
    found = jax.grad(lambda x, w: (float16.dot(x, w, along) * factor).sum(), (0, 1))(x, weights)
    wide = (each.astype(jnp.float32) for each in (x, weights))
    expected = jax.grad(lambda x, w: (jnp.tensordot(x, w, ((1,), (along,))) * factor).sum(), (0, 1))(*wide)
    for each, known in zip(found, expected, strict=True):
        assert each.dtype == jnp.float16
        np.testing.assert_allclose(np.asarray(each, np.float32), known, rtol=2e-3, atol=2e-3)


def test_whose_product_it_is(monkeypatch):
    half, brain = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float16, jnp.bfloat16))
    assert float16.slow(half((2, 8)), half((8, 3, 4)), 0)
    assert float16.slow(half((2, 8)), half((3, 4, 8)), 2)
    assert not float16.slow(half((2, 8)), half((3, 8, 4)), 1)
    assert not float16.slow(brain((2, 8)), brain((8, 4)), 0)
    assert not float16.slow(half((2, 8)), brain((8, 4)), 0)
    monkeypatch.setattr(float16, "lowering_target", lambda: Target("gpu", HOPPER))
    assert not float16.slow(half((2, 8)), half((8, 4)), 0)
