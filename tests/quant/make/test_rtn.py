"""Round-to-nearest: against float64, on weights that the grid holds exactly, and against the output of other tools."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.quant.ggml import E2M1_VALUES
from jaxinfer.quant.make import IntegerGrid, codebook, float8, integers, mxfp4
from jaxinfer.quant.make.codebooks import DYNAMIC, FP4, NF4
from tests.quant.make.references import Steps

RNG = np.random.default_rng(0)
WEIGHT = (RNG.normal(size=(24, 256)) * np.exp(RNG.normal(size=(24, 1)))).astype(np.float32)


@pytest.mark.parametrize(
    ("bits", "symmetric", "group"), [(4, True, 32), (4, False, 128), (3, False, 32), (2, True, 128), (8, True, 0)]
)
def test_integers_are_those_of_float64(bits: int, symmetric: bool, group: int):
    grid = IntegerGrid(bits, group, symmetric, "float16")
    made, steps = integers(jnp.asarray(WEIGHT), grid), Steps(grid)
    groups = WEIGHT.astype(np.float64).reshape(24, -1, group or 256)
    scale, zero = (part[..., None] for part in steps.fit(groups))
    codes = steps.code(groups, scale, zero)
    assert (np.asarray(made.parts["codes"]).astype(np.float64).reshape(codes.shape) == codes).mean() > 0.999
    expected = ((codes - zero) * scale).reshape(WEIGHT.shape)
    # where float32 rounded a tie the other way, the value is a step away
    assert (np.abs(np.asarray(made.dequantize()) - expected) < 1e-5).mean() > 0.999


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([3, 8]),
    st.booleans(),
    st.lists(st.floats(-60000, 60000, width=32), min_size=8, max_size=8),
    st.sampled_from(["float16", "bfloat16"]),
)
def test_no_value_is_further_off_than_its_step(bits: int, symmetric: bool, values: list[float], dtype: str):
    grid = IntegerGrid(bits, 8, symmetric, dtype)
    weight = np.asarray([values], np.float32)
    made = integers(jnp.asarray(weight), grid)
    codes, scale = np.asarray(made.parts["codes"]).astype(int), float(made.parts["scales"][0, 0])
    assert codes.min() >= grid.low
    assert codes.max() <= grid.high
    assert 0 < scale < np.inf
    slack = 2.0 ** -{"float16": 10, "bfloat16": 7}[dtype] * np.abs(weight).max()
    error = np.abs(np.asarray(made.dequantize()) - weight).max()
    assert error <= (0.5 if symmetric else 1.0) * scale * (1 + 1e-5) + slack * 2 + 1e-30


def test_weights_on_the_grid_stay_as_they_are():
    codes = RNG.integers(-8, 8, size=(8, 64)).astype(np.float32)
    codes[:, ::32], codes[:, 1::32] = -8, 7  # each group spans its range
    weight = (codes + 3) * 0.25
    made = integers(jnp.asarray(weight), IntegerGrid(4, 32, symmetric=False))
    assert np.array_equal(np.asarray(made.dequantize()), weight)


def test_a_weight_of_zeros_is_zeros():
    zeros = jnp.zeros((4, 64))
    made = [integers(zeros, IntegerGrid(4, 32, symmetric)) for symmetric in (True, False)]
    made += [float8(zeros), codebook(zeros, "nf4"), codebook(zeros, "nf4", nested=True), mxfp4(zeros)]
    for each in made:
        assert not np.asarray(each.dequantize()).any()


def test_groups_must_divide_the_inputs():
    for make in (lambda w: integers(w, IntegerGrid(4, 48)), lambda w: float8(w, (128, 48)), mxfp4):
        with pytest.raises(ValueError, match="do not divide 40 inputs"):
            make(jnp.zeros((4, 40)))


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_float8_is_the_nearest_e4m3(scale_dtype: str):
    made = float8(jnp.asarray(WEIGHT), scale_dtype=scale_dtype)
    scale = (np.abs(WEIGHT).max(1, keepdims=True) / 448).astype(np.dtype(scale_dtype)).astype(np.float32)
    expected = np.clip(WEIGHT / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    assert np.allclose(np.asarray(made.parts["scales"], np.float32), scale, rtol=1e-6)
    # a scale that differs in its last bit moves the few values halfway between two codes
    assert (np.abs(np.asarray(made.dequantize()) / expected - 1) < 1e-6).mean() > 0.999
    assert np.isfinite(np.asarray(made.dequantize())).all()


def test_float8_blocks_share_a_scale():
    weight = RNG.normal(size=(200, 256)).astype(np.float32)  # the second block of outputs is partial
    scales = np.asarray(float8(jnp.asarray(weight), (128, 128)).parts["scales"])
    for row in (0, 1):
        for column in (0, 1):
            block = weight[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
            own = scales[128 * row : 128 * (row + 1), column]
            assert np.allclose(own, np.abs(block).max() / 448, rtol=1e-6)


@pytest.mark.parametrize(("kind", "table", "inputs"), [("nf4", NF4, 256), ("fp4", FP4, 256), ("nf4", NF4, 172)])
def test_codebooks_take_the_nearest_entry(kind: str, table: np.ndarray, inputs: int):
    weight = WEIGHT[:16, :inputs]  # 16 rows of 172: blocks of 64 weights cross rows
    made = codebook(jnp.asarray(weight), kind)
    blocks = weight.reshape(-1, 64).astype(np.float64)
    scale = np.abs(blocks).max(-1, keepdims=True)
    distance = np.abs((blocks / scale)[..., None] - table.astype(np.float64))
    error = np.abs(np.asarray(made.dequantize()).reshape(blocks.shape) - blocks) / scale
    assert np.allclose(error, distance.min(-1), atol=1e-6)


def test_nested_scales_are_near_the_plain_ones():
    plain, nested = (codebook(jnp.asarray(WEIGHT), "nf4", nested=nested) for nested in (False, True))
    assert np.array_equal(np.asarray(plain.parts["codes"], np.int8), np.asarray(nested.parts["codes"], np.int8))
    of_plain, of_nested = (np.asarray(made.dequantize()) for made in (plain, nested))
    scales = np.asarray(plain.parts["scales"])
    largest = np.abs(scales - scales.mean()).max()
    assert np.abs(of_plain - of_nested).max() <= largest * np.diff(DYNAMIC).max() / 2 * (1 + 1e-5)


def test_mxfp4_scales_are_powers_of_two_and_values_the_nearest():
    made = mxfp4(jnp.asarray(WEIGHT))
    blocks = WEIGHT.reshape(24, -1, 32).astype(np.float64)
    scale = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - 2)
    assert np.array_equal(np.asarray(made.parts["scales"]).astype(np.float64), scale[..., 0])
    distance = np.abs((blocks / scale)[..., None] - np.asarray(E2M1_VALUES)).min(-1)
    error = np.abs(np.asarray(made.dequantize()).reshape(blocks.shape) - blocks) / scale
    assert np.allclose(error, distance, atol=1e-6)
