"""Matmuls of one row with 16-bit weights on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import one_row, sums
from pallas_kernels.choice import HOPPER, Target

DTYPES = ("bfloat16", "float16")
SHAPES = ((0, 768, (40,)), (0, 8, (3, 5)), (0, 2048, (2, 17)), (1, 768, (40,)), (1, 896, (33,)), (1, 256, (7,)))


def operands(dtype, along, inputs, outputs, rows=(1,)):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((*rows, inputs)), rng.standard_normal((*outputs, inputs))
    weights = np.moveaxis(weights, -1, 0) if along == 0 else weights
    return jnp.asarray(x).astype(dtype), jnp.asarray(weights).astype(dtype)


def exact(x, weights, along):
    x, weights = (np.asarray(array.astype(jnp.float32), np.float64) for array in (x, weights))
    return np.tensordot(x, weights, ((x.ndim - 1,), (0 if along == 0 else weights.ndim - 1,)))


def product(x, weights, along):
    return one_row.dot(x, weights, along, one_row.slices(x.shape[-1], along))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("along", "inputs", "outputs"), SHAPES)
def test_products_are_rounded_once(dtype, along, inputs, outputs):
    """The bound excludes a lost input and a 16-bit sum: half a unit in the last place of the result plus the error of
    float32 sums."""
    x, weights = operands(dtype, along, inputs, outputs, rows=(1, 1))
    found, expected = jax.jit(functools.partial(product, along=along))(x, weights), exact(x, weights, along)
    assert (found.dtype, found.shape) == (x.dtype, (1, 1, *outputs))
    off = np.abs(np.asarray(found.astype(jnp.float32)) - expected)
    assert (off <= 0.5 * jnp.finfo(dtype).eps * np.abs(expected) + 1e-5).all()


def test_a_gradient_is_that_of_a_product():
    for along in (0, 1):
        x, weights = operands("bfloat16", along, 256, (6,))
        by_slices = jax.grad(lambda x, w, along=along: product(x, w, along).sum().astype(jnp.float32), (0, 1))
        plain = jax.grad(lambda x, w, along=along: sums.dot(x, w, along).sum().astype(jnp.float32), (0, 1))
        for found, expected in zip(by_slices(x, weights), plain(x, weights), strict=True):
            assert jnp.allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("along", [0, 1])
def test_no_program_writes_a_weight_down(along):
    x, weights = operands("bfloat16", along, 768, (1024,))
    compiled = jax.jit(functools.partial(product, along=along)).lower(x, weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= weights.nbytes / 2


@pytest.mark.parametrize(
    ("inputs", "first", "last"),
    [(768, 8, 48), (896, 8, 56), (2048, 8, 64), (4096, 8, 64), (2560, 8, 80), (24, 8, None), (300, None, None)],
)
def test_weights_are_cut_evenly(inputs, first, last):
    assert (one_row.slices(inputs, 0), one_row.slices(inputs, 1)) == (first, last)


def test_whose_product_it_is(monkeypatch):
    one, few = ((rows, 64) for rows in (1, 2))
    wide, narrow = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16))
    weights = narrow((64, 8))
    assert one_row.alone(narrow(one), weights)
    assert one_row.alone(narrow((64,)), weights)
    for x in (narrow(few), wide(one), jax.ShapeDtypeStruct(one, jnp.int16), jax.ShapeDtypeStruct(one, jnp.float16)):
        assert not one_row.alone(x, weights)
    monkeypatch.setattr(one_row, "lowering_target", lambda: Target("gpu", HOPPER))
    assert not one_row.alone(narrow(one), weights)


@pytest.mark.parametrize("along", [0, 1])
def test_what_cannot_be_cut_has_a_second_row(along):
    """XLA's own single-row loop would take twenty times as long."""
    x, weights = operands("bfloat16", along, 300, (3, 5))
    dot = jax.jit(functools.partial(sums.dot, along=along if along == 0 else 2))
    two = jnp.concatenate([x, jnp.zeros_like(x)])
    np.testing.assert_array_equal(dot(x, weights), dot(two, weights)[:1])
    np.testing.assert_array_equal(dot(x[0], weights), dot(two, weights)[0])
    assert "tensor<2x300xbf16>" in dot.lower(x, weights).as_text()
