"""Operands of matmuls with quantised weights and the tolerances of their results."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quant_matmul import reference

DIGITS = {"float32": 24, "bfloat16": 8, "float16": 11}  # significand bits


def operands(
    *,
    rows=3,
    n=128,
    k=512,
    group=128,
    dtype=jnp.int4,
    x_dtype=jnp.bfloat16,
    scale_dtype=jnp.bfloat16,
    zeros=False,
    e2m1=False,
    seed=0,
):
    """Draw x, weights, scales, zeros; ``group`` None: one scale (zero) per channel; ``e2m1``: indices and exponents."""
    rng = np.random.default_rng(seed)
    if e2m1:
        x = jnp.asarray(rng.normal(size=(rows, k)), x_dtype)
        exponents = jnp.asarray(rng.integers(120, 132, size=(k // 32, n)), jnp.uint8)
        return x, jnp.asarray(rng.integers(-7, 8, size=(n, k)), jnp.int4), exponents, None
    if dtype == jnp.float8_e4m3fn:
        numbers = rng.normal(size=(n, k)) * 50
    else:
        most = 2 ** (3 if dtype == jnp.int4 else 7)
        numbers = rng.integers(-most, most, size=(n, k))
    groups = k // (group or k)
    factors = (n,) if group is None else (groups, n)
    return (
        jnp.asarray(rng.normal(size=(rows, k)), x_dtype),
        jnp.asarray(numbers.astype(np.float32)).astype(dtype),
        jnp.asarray(rng.uniform(0.5, 1.5, size=factors), scale_dtype),
        jnp.asarray(rng.integers(-8, 9, size=(groups, n)), jnp.int8) if zeros else None,
    )


def stack(experts, **options):
    """Return the weights [experts, n, k], scales and zeros [groups, experts, n] of several experts."""
    each = [operands(**{"k": 256, **options}, seed=seed)[1:] for seed in range(experts)]
    numbers, scales, zeros = zip(*each, strict=True)
    zeros = None if zeros[0] is None else jnp.stack(zeros, axis=1)
    return jnp.stack(numbers), jnp.stack(scales, axis=1), zeros


def assert_close(got, arrays, *, within=1e-6, e2m1=False):
    """Check to half a unit in the last place of the result dtype plus ``within`` of the sum of all magnitudes."""
    x, weights, scales, zeros = arrays
    with jax.enable_x64(True):
        want = np.asarray(reference.matmul(*arrays, e2m1=e2m1, dtype=jnp.float64))
        weight = reference.dequantized(weights, scales, zeros, e2m1=e2m1, dtype=jnp.float64)
        sizes = np.asarray(jnp.abs(x.astype(jnp.float64)) @ jnp.abs(weight).T)
    rounding = np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 1e-30))) - DIGITS[got.dtype.name])
    error = np.abs(np.asarray(got, np.float64) - want)
    np.testing.assert_array_less(error, rounding + within * sizes)
