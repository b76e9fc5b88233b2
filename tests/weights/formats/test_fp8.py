"""FP8 with block scales (partial blocks at the edges included), with one scale, and rejected checkpoints."""

import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.weights.files import refused
from tests.weights.formats.checkpoints import numbers, weights_of

FP8 = ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(0)
CODES = RNG.uniform(-448, 448, (20, 24)).astype(FP8)
BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 16]}
GRID = RNG.uniform(0.001, 0.01, (3, 2)).astype(np.float32)
ONE = {"quant_method": "fp8", "activation_scheme": "static"}


def by_blocks(scales: np.ndarray) -> np.ndarray:
    weight = np.empty(CODES.shape, np.float32)
    for out, i in np.ndindex(*CODES.shape):
        weight[out, i] = np.float32(CODES[out, i]) * np.float32(scales[out // 8, i // 16])
    return weight


def test_partial_blocks(tmp_path: pathlib.Path) -> None:
    weights, consumed = weights_of(tmp_path, {"a.weight": CODES, "a.weight_scale_inv": GRID}, BLOCK)
    assert consumed == {"a.weight", "a.weight_scale_inv"}
    layout = weights["a.weight"].layout
    assert (layout.group, layout.activations, layout.activation_group) == (8, "float8_e4m3fn", 16)
    np.testing.assert_array_equal(numbers(weights["a.weight"]), by_blocks(GRID))


@pytest.mark.parametrize("stored", ["float32", "exponents", "e8m0"])
def test_powers_of_two(tmp_path: pathlib.Path, stored: str) -> None:
    exponents = RNG.integers(110, 130, (3, 2), np.uint8)
    powers = exponents.view(ml_dtypes.float8_e8m0fnu)
    scales = {"float32": powers.astype(np.float32), "exponents": exponents, "e8m0": powers}[stored]
    config = {**BLOCK, "scale_fmt": "ue8m0"}
    weight = weights_of(tmp_path, {"a.weight": CODES, "a.weight_scale_inv": scales}, config)[0]["a.weight"]
    np.testing.assert_array_equal(numbers(weight), by_blocks(powers.astype(np.float32)))


def test_a_weight_smaller_than_a_block(tmp_path: pathlib.Path) -> None:
    config = {**BLOCK, "weight_block_size": [128, 128]}
    tensors = {"a.weight": CODES, "a.weight_scale_inv": GRID[:1, :1]}
    weight = weights_of(tmp_path, tensors, config)[0]["a.weight"]
    assert weight.layout.group == 24
    np.testing.assert_array_equal(numbers(weight), CODES.astype(np.float32) * GRID[0, 0])


@pytest.mark.parametrize("names", [("weight_scale", "input_scale"), ("weight_scale_inv", "activation_scale")])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale(tmp_path: pathlib.Path, names: tuple[str, str], shape: tuple[int, ...]) -> None:
    scales = {f"a.{names[0]}": np.full(shape, 0.01, np.float32), f"a.{names[1]}": np.full(shape, 0.5, np.float32)}
    weights, consumed = weights_of(tmp_path, {"a.weight": CODES, **scales, "b.k_scale": np.ones(1, np.float32)}, ONE)
    assert consumed == {"a.weight", *scales, "b.k_scale"}
    weight = weights["a.weight"]
    assert weight.layout.static
    assert weight.read("input_scale") == 0.5
    np.testing.assert_array_equal(numbers(weight), CODES.astype(np.float32) * np.float32(0.01))


def test_a_scale_for_each_output(tmp_path: pathlib.Path) -> None:
    scales = RNG.uniform(0.1, 1, (20, 1)).astype(ml_dtypes.bfloat16)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    weight = weights_of(tmp_path, {"a.weight": CODES, "a.weight_scale": scales}, config)[0]["a.weight"]
    assert not weight.layout.static
    np.testing.assert_array_equal(numbers(weight), CODES.astype(np.float32) * scales.astype(np.float32))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({**BLOCK, "activation_scheme": "static"}, "activation_scheme of config.json is 'static': known are dynamic"),
        ({**BLOCK, "weight_block_size": [0, 128]}, "weight_block_size of config.json is .0, 128.: known are"),
        ({**BLOCK, "weight_block_size": [128]}, "weight_block_size of config.json"),
        ({**BLOCK, "weight_block_size": 128}, "weight_block_size of config.json is 128"),
        ({**BLOCK, "weight_block_size": [2**70, 1]}, "weight_block_size of config.json"),
    ],
)
def test_configurations(tmp_path: pathlib.Path, config: Mapping[str, Any], sentence: str) -> None:
    with refused(sentence):
        weights_of(tmp_path, {"a.weight": CODES, "a.weight_scale_inv": GRID}, config)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"a.weight_scale_inv": GRID[:2]},
            r"'a.weight_scale_inv' .* has shape \[2, 2\] where .* \[3, 2\]",
        ),
        ({"a.weight_scale_inv": np.full_like(GRID, np.inf)}, "NaN or infinite"),
        ({"a.weight": CODES.astype(np.float16)}, "is stored as F16 where its format has F8_E4M3"),
        ({"a.weight": CODES.astype(ml_dtypes.float8_e5m2)}, "is stored as F8_E5M2"),
        ({"a.weight": CODES[None]}, r"has shape \[1, 20, 24\]"),
    ],
)
def test_tensors(tmp_path: pathlib.Path, change: Mapping[str, np.ndarray], sentence: str) -> None:
    tensors = {"a.weight": CODES, "a.weight_scale_inv": GRID, **change}
    with refused(sentence):
        weights_of(tmp_path, tensors, BLOCK)[0]["a.weight"].read("scales")


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan])
def test_an_input_scale_that_is_none(tmp_path: pathlib.Path, scale: float) -> None:
    tensors = {"a.weight": CODES, "a.weight_scale": np.ones(1, np.float32), "a.input_scale": np.full(1, scale, "f4")}
    with refused("'a.input_scale' .* (not a positive number|NaN)"):
        weights_of(tmp_path, tensors, ONE)


def test_a_missing_input_scale(tmp_path: pathlib.Path) -> None:
    with refused("lacks tensor 'a.input_scale'"):
        weights_of(tmp_path, {"a.weight": CODES, "a.weight_scale": np.ones(1, np.float32)}, ONE)
