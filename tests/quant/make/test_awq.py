"""The scale searches of AWQ and SmoothQuant, against their equations in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant.make import IntegerGrid, smoothing
from jaxinfer.quant.make.awq import POINTS, candidates, clipped, losses
from tests.quant.make.references import Steps, correlated, output_error

GRID = IntegerGrid(4, 64, symmetric=False)
WEIGHT = np.random.default_rng(3).normal(size=(32, 128)) * 0.1
X = correlated(512, 128, seed=3)
GRAM = jnp.asarray(X.T @ X, jnp.float32)


def rounded(weight: np.ndarray) -> np.ndarray:
    steps = Steps(GRID)
    groups = weight.reshape(weight.shape[0], -1, GRID.group)
    scale, zero = (part[..., None] for part in steps.fit(groups))
    return ((steps.code(groups, scale, zero) - zero) * scale).reshape(weight.shape)


def test_losses_are_those_of_outputs_in_float64():
    magnitude = np.abs(X).mean(0)
    scales = candidates(jnp.asarray(magnitude, jnp.float32))
    found = np.asarray(losses(jnp.asarray(WEIGHT, jnp.float32), GRAM, scales, GRID))
    energy = ((X @ WEIGHT.T) ** 2).sum()
    for point in (0, 7, 13):
        s = magnitude ** (point / POINTS)
        s = s / np.sqrt(s.max() * s.min())
        assert np.allclose(np.asarray(scales[point]), s, rtol=1e-4)
        expected = output_error(WEIGHT, rounded(WEIGHT * s) / s, X) * energy
        assert found[point] == pytest.approx(expected, rel=1e-2)
    assert found.min() < 0.7 * found[0]  # large inputs deserve larger weights


def test_clipping_loses_no_more_than_not_clipping():
    weight = WEIGHT.copy()
    weight[:, 5] = 3.0  # an outlier whose input is nearly zero
    x = X.copy()
    x[:, 5] *= 1e-3
    gram = jnp.asarray(x.T @ x, jnp.float32)
    result = np.asarray(clipped(jnp.asarray(weight, jnp.float32), gram, GRID), np.float64)
    for group in range(2):
        part = slice(64 * group, 64 * group + 64)
        clip, plain = (output_error(weight[:, part], rounded(w)[:, part], x[:, part]) for w in (result, weight))
        assert clip <= plain * (1 + 1e-4)
    assert np.abs(result[:, 5]).mean() < 0.75 * 3.0
    assert np.array_equal(np.sign(result), np.sign(weight))


def test_smoothing_balances_inputs_and_weights():
    inputs, weights = np.abs(X).max(0), np.abs(WEIGHT).max(0)
    s = np.asarray(smoothing(jnp.asarray(inputs, jnp.float32), jnp.asarray(weights, jnp.float32), 0.5))
    assert np.allclose(s, np.sqrt(inputs / weights), rtol=1e-4)
    assert np.allclose(inputs / s, weights * s, rtol=1e-4)  # alpha = 1/2: both have the same range
    assert np.isfinite(np.asarray(smoothing(jnp.zeros(4), jnp.zeros(4), 0.5))).all()
