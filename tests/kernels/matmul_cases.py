"""Operands of dense matmuls and the tolerances of their results."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.matmul import Extras
from pallas_kernels.matmul.types import outputs_of
from tests.kernels.quant_cases import DIGITS

BF16, FP16, FP8, INT8, F32 = jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.float32
NAMES = Extras._fields


def operands(rows=3, n=64, k=128, *, dtype=BF16, layout="in first", gated=False, extras=(), result=BF16, whole=False):
    """Return x, weights and the named extras.

    Args:
        whole: draw whole numbers scaled by powers of two: every sum is exact in float32, and every step must round.
    """
    rng = np.random.default_rng(0)

    def draw(*dims, into=dtype, spread=1.0):
        numbers = rng.normal(size=dims)
        return jnp.asarray((np.round(8 * numbers) if whole else numbers) * spread, F32).astype(into)

    outputs = (2, n) if gated else (n,)
    weights = (k, *outputs) if layout == "in first" else (*outputs, k)
    small = 2.0**-9 if gated and whole else k**-0.5 if gated else 1.0  # keep gates near zero
    of_x = small if dtype not in (INT8, FP8) else 1.0
    spread = 40.0 if dtype == INT8 and not whole else 1.0
    given = {
        "x_scales": jnp.asarray(rng.choice([0.25, 0.5, 2.0], rows) if whole else rng.uniform(0.5, 1.5, rows), F32),
        "scales": jnp.asarray(rng.choice([0.5, 1.0, 4.0], outputs) if whole else rng.uniform(0.5, 1.5, outputs), F32),
        "bias": draw(*outputs, into=result, spread=32 * small if whole else 4),
        "residual": draw(rows, n, into=result, spread=64 * small if whole else 4),
    }
    given["x_scales"] *= small / of_x / spread**2
    x = draw(rows, k, spread=of_x * spread)
    return x, draw(*weights, spread=spread), Extras(**{name: given[name] for name in extras})


def half_unit(numbers, dtype):
    """Return half a unit in the last place of ``dtype``: the largest rounding error."""
    return np.exp2(np.floor(np.log2(np.maximum(np.abs(numbers), 1e-30))) - DIGITS[jnp.dtype(dtype).name])


def assert_close(got, arrays, *, layout="in first", gated=False):
    """Check to half a unit in the last place per rounding step, plus 1e-6 of the sum of all magnitudes."""
    want, bound = _product(*arrays, layout)
    for step in _steps(arrays[2], gated):
        want, bound = step(want, bound)
        bound = bound + half_unit(np.abs(want) + bound, got.dtype)
    assert got.shape == want.shape
    np.testing.assert_array_less(np.abs(np.asarray(got, np.float64) - want), bound + 1e-30)


def _product(x, weights, extras, layout):
    """Return the float64 product and the tolerance of its sum."""
    outputs = outputs_of(weights, layout)
    wide, flat = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    flat = flat.reshape(x.shape[1], -1) if layout == "in first" else flat.reshape(-1, x.shape[1]).T
    factors = np.ones((x.shape[0], *outputs))
    if extras.x_scales is not None:
        factors *= np.asarray(extras.x_scales, np.float64).reshape(-1, *[1] * len(outputs))
    if extras.scales is not None:
        factors *= np.asarray(extras.scales, np.float64)
    want, sizes = ((a @ b).reshape(factors.shape) * factors for a, b in ((wide, flat), (abs(wide), abs(flat))))
    return want, 1e-6 * sizes


def _steps(extras, gated):
    """Yield the epilogue steps on exact values and error bounds; each step rounds to the result dtype."""
    yield lambda want, bound: (want, bound)
    if extras.bias is not None:
        yield lambda want, bound: (want + np.asarray(extras.bias, np.float64), bound)
    if gated:
        yield _silu_of_gate
        yield lambda want, bound: (
            want[0] * want[1],
            np.abs(want[0]) * bound[1] + (np.abs(want[1]) + bound[1]) * bound[0],
        )
    if extras.residual is not None:
        yield lambda want, bound: (want + np.asarray(extras.residual, np.float64), bound)


def _silu_of_gate(want, bound):
    """Apply SiLU to the gate (slope at most 1.1); pass up unchanged, without rounding."""
    gate = want[:, 0] / (1 + np.exp(-want[:, 0]))
    return np.stack([gate, want[:, 1]]), np.stack([1.1 * bound[:, 0] + 1e-6 * np.abs(gate), bound[:, 1]])
