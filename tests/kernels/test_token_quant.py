"""Per-token 8-bit quantisation by XLA against the reference, and the path choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.choice import ADA, AMPERE, HOPPER, Target
from pallas_kernels.token_quant import Rule, api, explain, quantize, reference, xla

RULES = [Rule("int8", 127.5), Rule("int8", 127.0), Rule("float8_e4m3fn", 448.0), Rule("float8_e4m3fn", 448.0, 2.5)]


def tokens(rows: int, inputs: int = 256) -> jax.Array:
    """Return tokens of very different magnitudes, one of zeros and one with an outlier."""
    x = np.random.default_rng(rows).standard_normal((rows, inputs)) * np.exp2(np.arange(rows) - 4)[:, None]
    x[rows // 2] = 0
    x[-1, 3] = 1e4
    return jnp.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_a_program_divides_as_single_operations_do(rule, rows):
    found = jax.jit(functools.partial(xla.quantize, rule=rule))(tokens(rows))
    for got, want in zip(found, reference.quantize(np.asarray(tokens(rows)), rule), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.fixture
def kernel(monkeypatch):
    """Return a function that replaces the kernel; the kernel's cached traces are cleared."""
    api._kernel.cache_clear()
    yield lambda stand_in: monkeypatch.setattr(api.mosaic, "quantize", stand_in)
    api._kernel.cache_clear()


@pytest.mark.parametrize("path", ["auto", "mosaic"])
def test_a_batch_of_calls_is_xlas(kernel, path):
    nothing = jnp.zeros((9, 256), jnp.int8), jnp.zeros(9)
    kernel(lambda x, rule, multiple: nothing)  # traced, but not run
    x = jnp.stack([tokens(9), tokens(9) * 3])
    found = jax.jit(jax.vmap(lambda x: quantize(x, RULES[0], path=path)))(x)
    codes, scales = reference.quantize(np.asarray(x[1]), RULES[0])
    np.testing.assert_allclose(found[1][1], scales, rtol=2e-7)  # in a batch XLA divides differently
    np.testing.assert_allclose(np.asarray(found[0][1], np.int32), np.asarray(codes, np.int32), atol=1)


@pytest.mark.parametrize(("multiple", "count"), [(1, 9), (9, 9), (8, 16), (64, 64)])
def test_the_number_of_scales_is_a_multiple(multiple, count):
    codes, scales = quantize(tokens(9), RULES[0], path="xla", multiple=multiple)
    assert (codes.shape, scales.shape) == ((9, 256), (count,))
    np.testing.assert_array_equal(scales[:9], quantize(tokens(9), RULES[0], path="xla")[1])


def test_the_kernel_is_launched_for_a_single_call(kernel):
    kernel(lambda x, rule, multiple: (x.astype(rule.dtype), jnp.full(x.shape[0], 7.0)))
    assert float(quantize(tokens(9), RULES[0], path="mosaic")[1][0]) == 7


@pytest.mark.parametrize(
    ("shape", "dtype", "rule", "capability", "path"),
    [
        ((3, 4096), "bfloat16", RULES[0], HOPPER, "mosaic"),
        ((1, 11008), "float16", RULES[2], HOPPER, "mosaic"),
        ((3, 4096), "bfloat16", RULES[0], AMPERE, "mosaic"),
        ((3, 4096), "bfloat16", RULES[2], AMPERE, "xla"),
        ((3, 4096), "bfloat16", RULES[2], ADA, "mosaic"),
        ((3, 4096), "float32", RULES[0], HOPPER, "xla"),
        ((3, 4160), "bfloat16", RULES[0], HOPPER, "xla"),
        ((3, 32768), "bfloat16", RULES[0], HOPPER, "xla"),
        ((0, 4096), "bfloat16", RULES[0], HOPPER, "xla"),
    ],
)
def test_the_kernel_is_where_it_can_be(shape, dtype, rule, capability, path):
    x, target = jax.ShapeDtypeStruct(shape, dtype), Target("gpu", capability)
    assert explain(x, rule, target=target).path == path
    assert explain(x, rule, target=Target("cpu")).path == "xla"
    if path == "xla" and capability == HOPPER:
        with pytest.raises(ValueError, match=r"tokens .*of"):
            explain(x, rule, path="mosaic", target=target)
