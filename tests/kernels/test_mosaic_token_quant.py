"""The Mosaic GPU kernel of token_quant, interpreted on the CPU. Compilation to machine code: test_check.py."""

import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.token_quant import Rule, mosaic
from tests.kernels.test_token_quant import RULES, tokens


def run(x: jax.Array, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    def launch(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mosaic.quantize(x, rule, interpret=compat.interpret_params())

    codes, scales = compat.interpreted(lambda: jax.jit(launch)(x))
    return np.asarray(codes), np.asarray(scales)


def assert_right(x: jax.Array, rule: Rule) -> None:
    """Check against float64: each code is the nearest one, except within a last bit of the midpoint of two codes."""
    codes, scales = run(x, rule)
    numbers = np.asarray(x, np.float64)
    largest = np.maximum(np.minimum(abs(numbers).max(-1), rule.bound or np.inf), 1e-30)
    np.testing.assert_allclose(scales, largest / rule.most, rtol=3e-7)
    exact = numbers / scales[:, None].astype(np.float64)
    near = [_codes(exact * (1 + error), rule) for error in (-4e-7, 4e-7)]
    assert codes.dtype == near[0].dtype
    found, low, high = (each.astype(np.float64) for each in (codes, *near))
    assert np.all((np.minimum(low, high) <= found) & (found <= np.maximum(low, high)))


def _codes(numbers: np.ndarray, rule: Rule) -> np.ndarray:
    if rule.dtype == "int8":
        return np.clip(np.rint(numbers), -128, 127).astype(np.int8)
    return np.clip(numbers, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("inputs", [128, 1280])
def test_equals_float64(rule, inputs):
    assert_right(tokens(9, inputs), rule)


def test_half_precision():
    assert_right(jnp.clip(tokens(5), -6e4, 6e4).astype(jnp.float16), RULES[0])


def test_scales_beyond_the_rows_are_not_computed():
    """Their number is a multiple; those of the rows are the same."""

    def launch(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mosaic.quantize(x, RULES[0], multiple=64, interpret=compat.interpret_params())

    codes, scales = compat.interpreted(lambda: jax.jit(launch)(tokens(9)))
    assert scales.shape == (64,)
    for got, want in zip((codes, scales[:9]), run(tokens(9), RULES[0]), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("place", [0, 6])
def test_no_bit_of_a_token_depends_on_others(place):
    """All other tokens are NaN in one launch and absent in the other."""
    token = tokens(3)[:1]
    others = jnp.full((7, 256), jnp.nan, jnp.bfloat16).at[place].set(token[0])
    for among, alone in zip(run(others, RULES[0]), run(token, RULES[0]), strict=True):
        np.testing.assert_array_equal(among[place], alone[0])


MUTATIONS = {
    "the last quarter": ("for warp in range(WARPS)", "for warp in range(WARPS - 1)"),
    "the first quarter alone": ("smem.largest[warp]", "smem.largest[0]"),
    "magnitudes": ("jnp.abs(numbers).max", "numbers.max"),
    "another token's scale": ("scales[token] = scale", "scales[lax.rem(token + 1, 9)] = scale"),
    "another token's codes": ("codes.at[token]", "codes.at[lax.rem(token + 1, 9)]"),
    "what a token is divided by": ("numbers / scale", "numbers / rule.most"),
    "the rule": (" / rule.most", " / 127.0"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name, monkeypatch):
    old, new = MUTATIONS[name]
    source = inspect.getsource(mosaic)
    assert old in source
    mutant = dict(mosaic.__dict__)
    exec(compile(source.replace(old, new), mosaic.__file__, "exec"), mutant)
    monkeypatch.setattr(mosaic, "_body", mutant["_body"])
    x = tokens(9)
    x = x.at[2, -3].set(40).at[3, 3].set(-50).at[5].set(-jnp.abs(x[5]))  # a maximum in each quarter, and negative ones
    with pytest.raises((AssertionError, RuntimeError)):
        assert_right(x, RULES[0])
