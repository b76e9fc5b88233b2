"""Handmade bitsandbytes checkpoints: blocks that cross rows, codes in float tensors, and rejected ones."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.weights.files import refused
from tests.weights.formats.checkpoints import numbers, weights_of

OUT, INPUTS, BLOCK, NESTED = 6, 40, 16, 4
BLOCKS = OUT * INPUTS // BLOCK
RNG = np.random.default_rng(0)
TABLE = np.sort(RNG.uniform(-1, 1, 16)).astype(np.float32)
CODES = RNG.integers(0, 16, OUT * INPUTS, np.uint8)
STATE = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": [OUT, INPUTS]}
DOUBLE = {**STATE, "nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": 0.123456789}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
FOUR = {
    "quant_method": "bitsandbytes",
    "load_in_8bit": False,
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
}


def text(state: object) -> np.ndarray:
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def made(state: Mapping[str, Any] = STATE) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return tensors, and the weight by definition: value by value of the flattened weight."""
    tensors = {
        "a.weight": (CODES[0::2] << 4 | CODES[1::2]).reshape(-1, 1),
        "a.weight.quant_map": TABLE,
        "a.weight.quant_state.bitsandbytes__nf4": text(state),
    }
    if "nested_offset" in state:
        absmax = RNG.integers(0, 256, BLOCKS, np.uint8)
        nested = RNG.uniform(0.1, 1, -(-BLOCKS // NESTED)).astype(np.float32)
        table = np.sort(RNG.uniform(-1, 1, 256)).astype(np.float32)
        tensors |= {"a.weight.absmax": absmax, "a.weight.nested_absmax": nested, "a.weight.nested_quant_map": table}
        scales = [table[absmax[i]] * nested[i // NESTED] + np.float32(state["nested_offset"]) for i in range(BLOCKS)]
    else:
        tensors["a.weight.absmax"] = RNG.uniform(0.1, 1, BLOCKS).astype(np.float32)
        scales = list(tensors["a.weight.absmax"])
    flat = np.array([TABLE[code] * scales[place // BLOCK] for place, code in enumerate(CODES)], np.float32)
    return tensors, flat.reshape(OUT, INPUTS)


@pytest.mark.parametrize("state", [STATE, DOUBLE], ids=["plain", "double"])
def test_four_bits(tmp_path: pathlib.Path, state: Mapping[str, Any]) -> None:
    tensors, expected = made(state)
    weights, consumed = weights_of(tmp_path, tensors, FOUR)
    assert consumed == tensors.keys()
    layout = weights["a.weight"].layout
    assert (layout.group, layout.nested) == (8, 8 if state is DOUBLE else 0)  # gcds of 40 with 16 and with 64
    np.testing.assert_array_equal(numbers(weights["a.weight"]), expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_codes_in_a_tensor_of_floats(tmp_path: pathlib.Path, dtype: Any) -> None:
    tensors, expected = made()
    tensors["a.weight"] = tensors["a.weight"].reshape(-1).view(dtype).reshape(-1, 1)
    np.testing.assert_array_equal(numbers(weights_of(tmp_path, tensors, FOUR)[0]["a.weight"]), expected)


def test_eight_bits(tmp_path: pathlib.Path) -> None:
    codes = RNG.integers(-128, 128, (OUT, INPUTS), np.int8)
    scales = RNG.uniform(0.1, 1, OUT).astype(np.float32)
    tensors = {"a.weight": codes, "a.SCB": scales, "a.weight_format": np.array(0, np.uint8)}
    weights, consumed = weights_of(tmp_path, tensors, EIGHT)
    assert consumed == tensors.keys()
    expected = codes.astype(np.float32) * scales[:, None] * np.float32(1 / 127)
    np.testing.assert_array_equal(numbers(weights["a.weight"]), expected)
    assert weights["a.weight"].layout.outliers == 6
    other = weights_of(tmp_path, tensors, {**EIGHT, "llm_int8_threshold": 0.0})[0]["a.weight"]
    assert other.layout.outliers == 0


@pytest.mark.parametrize("threshold", [-1, float("nan"), float("inf"), "six", True])
def test_thresholds_that_are_refused(tmp_path: pathlib.Path, threshold: Any) -> None:
    with refused("llm_int8_threshold of config.json is .*: known are 0 to 1048576"):
        weights_of(tmp_path, {"a.SCB": np.ones(1, np.float32)}, {**EIGHT, "llm_int8_threshold": threshold})


def test_another_order_of_eight_bits(tmp_path: pathlib.Path) -> None:
    tensors = {
        "a.weight": np.zeros((OUT, INPUTS), np.int8),
        "a.SCB": np.ones(OUT, np.float32),
        "a.weight_format": np.array(2, np.uint8),
    }
    with refused("'a.weight_format' .* is 2: known is 0"):
        weights_of(tmp_path, tensors, EIGHT)
    with refused(r"'a.SCB' .* asks \[6\]"):
        weights_of(tmp_path, {**tensors, "a.SCB": np.ones(5, np.float32)}, EIGHT)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type of config.json is 'int4': known are nf4, fp4"),
        ({"load_in_4bit": False}, "load_in_4bit of config.json is False"),
        ({"load_in_8bit": 2}, "load_in_8bit of config.json is 2"),
    ],
)
def test_configurations(tmp_path: pathlib.Path, change: Mapping[str, Any], sentence: str) -> None:
    with refused(sentence):
        weights_of(tmp_path, made()[0], {**FOUR, **change})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shape": [OUT, INPUTS, 1]}, "gives the shape '.6, 40, 1.', not"),
        ({"shape": [0, INPUTS]}, "gives the shape"),
        ({"shape": [2**40, 2**40]}, "has 120 bytes where 1208925819614629174706176 codes"),
        ({"shape": [OUT, INPUTS + 1]}, "has 120 bytes where 246 codes of 4 bits take 123"),
        ({"blocksize": 0}, "has blocksize '0', not 1 to"),
        ({"blocksize": 8}, r"absmax' .* has shape \[15\] where its format asks \[30\]"),
        ({"nested_blocksize": None}, "has nested_blocksize 'None'"),
        ({"nested_blocksize": 8}, r"nested_absmax' .* asks \[2\]"),
        ({"nested_offset": "0.1"}, "has nested_offset '0.1', not a float32 number"),
        ({"nested_offset": 1e300}, "has nested_offset '1e.300'"),
        ({"nested_offset": float("nan")}, "has nested_offset 'nan'"),
    ],
)
def test_states(tmp_path: pathlib.Path, change: Mapping[str, Any], sentence: str) -> None:
    tensors, _ = made(DOUBLE)
    state = text({**DOUBLE, **change})
    with refused(sentence):
        weights_of(tmp_path, {**tensors, "a.weight.quant_state.bitsandbytes__nf4": state}, FOUR)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"{", "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b"[" * 4000, "is not valid JSON"),
        (b" " * 5000, "is 5000 bytes long, more than 4096"),
        (b"\xff", "is not valid JSON"),
    ],
)
def test_states_that_are_none(tmp_path: pathlib.Path, raw: bytes, sentence: str) -> None:
    tensors = {**made()[0], "a.weight.quant_state.bitsandbytes__nf4": np.frombuffer(raw, np.uint8)}
    with refused(sentence):
        weights_of(tmp_path, tensors, FOUR)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("a.weight", np.zeros((119, 1), np.uint8), "has 119 bytes where 240 codes of 4 bits take 120"),
        ("a.weight.quant_map", np.zeros(15, np.float32), r"'a.weight.quant_map' .* asks \[16\]"),
        ("a.weight.quant_map", np.full(16, np.nan, np.float32), "NaN or infinite"),
        ("a.weight.absmax", np.zeros(BLOCKS, np.uint8), "is stored as U8 where its format has F32"),
    ],
)
def test_tensors(tmp_path: pathlib.Path, name: str, value: np.ndarray, sentence: str) -> None:
    with refused(sentence):
        weights_of(tmp_path, {**made()[0], name: value}, FOUR)
