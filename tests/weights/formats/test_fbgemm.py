"""FBGEMM's FP8: per-output scales, experts in one tensor, an upper bound of inputs, and rejected checkpoints."""

import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.weights.files import refused
from tests.weights.formats.checkpoints import numbers, weights_of

FP8 = ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(0)
CODES = RNG.uniform(-448, 448, (20, 24)).astype(FP8)
SCALES = RNG.uniform(0.1, 1, (20, 1)).astype(np.float32)
CONFIG = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 900.0, "modules_to_not_convert": ["lm_head", "b"]}
PLAIN = {"b.weight": np.ones((3, 24), ml_dtypes.bfloat16)}


def test_a_scale_for_each_output(tmp_path: pathlib.Path) -> None:
    weights, consumed = weights_of(tmp_path, {"a.weight": CODES, "a.weight_scale": SCALES, **PLAIN}, CONFIG)
    assert consumed == {"a.weight", "a.weight_scale"}
    layout = weights["a.weight"].layout
    assert (layout.group, layout.activations, layout.activation_group) == (24, "float8_e4m3fn", 0)
    assert (layout.activation_bound, layout.static) == (900.0, False)
    np.testing.assert_array_equal(numbers(weights["a.weight"]), CODES.astype(np.float32) * SCALES)


def test_the_bound_of_transformers_where_nothing_is_said(tmp_path: pathlib.Path) -> None:
    config = {"quant_method": "fbgemm_fp8"}
    weights, _ = weights_of(tmp_path, {"a.weight": CODES, "a.weight_scale": SCALES}, config)
    assert weights["a.weight"].layout.activation_bound == 1200.0


@pytest.mark.parametrize(("name", "form"), [("gate_up_proj", (3, 1, 20)), ("down_proj", (3, 20, 1))])
def test_experts_in_one_tensor(tmp_path: pathlib.Path, name: str, form: tuple[int, ...]) -> None:
    codes = RNG.uniform(-448, 448, (3, 24, 20)).astype(FP8)
    scales = RNG.uniform(0.1, 1, form).astype(np.float32)
    weights, consumed = weights_of(tmp_path, {f"e.{name}": codes, f"e.{name}_scale": scales}, CONFIG)
    assert consumed == {f"e.{name}", f"e.{name}_scale"}
    weight = weights[f"e.{name}"]
    assert (weight.shape, weight.layout.group, weight.layout.activation_bound) == ((3, 20, 24), 24, 900.0)
    expected = codes.astype(np.float32).swapaxes(1, 2) * scales.reshape(3, 20, 1)
    np.testing.assert_array_equal(numbers(weight), expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"activation_scale_ub": 0}, "activation_scale_ub of config.json is 0: known are positive numbers"),
        ({"activation_scale_ub": -1.0}, "activation_scale_ub of config.json is -1.0: known are 0 to"),
        ({"activation_scale_ub": "12O0"}, "activation_scale_ub of config.json is '12O0'"),
    ],
)
def test_configurations(tmp_path: pathlib.Path, change: dict[str, Any], sentence: str) -> None:
    with refused(sentence):
        weights_of(tmp_path, {"a.weight": CODES, "a.weight_scale": SCALES}, {**CONFIG, **change})


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"a.weight_scale": SCALES}, "lacks tensor 'a.weight'"),
        ({"a.weight": CODES.astype(np.float32), "a.weight_scale": SCALES}, "is stored as F32 where its format has F8"),
        ({"a.weight": CODES, "a.weight_scale": SCALES[:3]}, r"has shape \[3, 1\] where its format asks \[20, 1\]"),
        ({"e.down_proj": CODES[None], "e.down_proj_scale": SCALES[None, :, :]}, r"asks \[1, 24, 1\]"),
    ],
)
def test_tensors(tmp_path: pathlib.Path, tensors: dict[str, np.ndarray], sentence: str) -> None:
    with refused(sentence):
        weights_of(tmp_path, tensors, CONFIG)


def test_scales_that_are_no_numbers(tmp_path: pathlib.Path) -> None:
    broken = {"a.weight": CODES, "a.weight_scale": np.full((20, 1), np.nan, np.float32)}
    with refused("NaN or infinite"):
        weights_of(tmp_path, broken, CONFIG)[0]["a.weight"].read("scales")
