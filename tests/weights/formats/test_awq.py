"""Handmade AWQ checkpoints, with a shorter last group, and rejected ones."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.weights.files import refused
from tests.weights.formats.checkpoints import numbers, weights_of

INPUTS, OUT, SIZE = 48, 16, 32
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": SIZE, "version": "gemm", "zero_point": True}


def packed(values: np.ndarray) -> np.ndarray:
    """Pack eight outputs per word; the nibbles from the lowest hold outputs 0, 2, 4, 6, 1, 3, 5 and 7."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for row in range(values.shape[0]):
        for output in range(values.shape[1]):
            nibble = [0, 4, 1, 5, 2, 6, 3, 7][output % 8]
            words[row, output // 8] |= np.uint32(values[row, output] << (4 * nibble))
    return words.view(np.int32)


def made() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 16, (INPUTS, OUT)), rng.integers(0, 16, (2, OUT))
    scales = rng.uniform(0.01, 0.1, (2, OUT)).astype(np.float16)
    group = np.arange(INPUTS) // SIZE
    weight = (codes - zeros[group]).astype(np.float32) * scales[group].astype(np.float32)
    return {"a.qweight": packed(codes), "a.qzeros": packed(zeros), "a.scales": scales}, weight.T


def test_a_weight(tmp_path: pathlib.Path) -> None:
    tensors, expected = made()
    weights, consumed = weights_of(tmp_path, {**tensors, "a.bias": np.zeros(OUT, np.float16)}, CONFIG)
    assert consumed == tensors.keys()
    assert weights["a.weight"].layout.group == 16
    np.testing.assert_array_equal(numbers(weights["a.weight"]), expected)


@pytest.mark.parametrize(
    "config",
    [
        {"w_bit": 4, "q_group_size": SIZE, "version": "GEMM", "zero_point": True},
        {"quant_method": "awq", "bits": "4", "group_size": 32.0, "version": None},
        {"quant_method": "awq", "bits": 4, "group_size": SIZE, "checkpoint_format": "gemm", "format": "gemm"},
        {"quant_method": "AWQ", "q_group_size": SIZE, "zero_point": False, "modules_to_not_convert": None},
        {"method": "awq", "bits": 4, "group_size": 16, "dynamic": {"+:a$": {"group_size": SIZE}}},
    ],
)
def test_spellings(tmp_path: pathlib.Path, config: Mapping[str, Any]) -> None:
    """Config keys of llm-awq, AutoAWQ, GPTQModel and auto-round."""
    tensors, expected = made()
    np.testing.assert_array_equal(numbers(weights_of(tmp_path, tensors, config)[0]["a.weight"]), expected)


def test_scales_of_unequal_groups_are_of_no_size(tmp_path: pathlib.Path) -> None:
    tensors, _ = made()
    tensors["a.scales"] = np.ones((5, OUT), np.float16)
    with refused("'a.scales' .* is of 5 groups of 48 inputs, and group_size is absent"):
        weights_of(tmp_path, tensors, {**CONFIG, "group_size": None})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bits": 8}, "bits of config.json is 8: known are 4"),
        *(
            ({"version": kind}, f"version of config.json is '{kind}': known are gemm.* quantise the original again")
            for kind in ("gemv", "gemv_fast", "marlin", "exllama", "ipex")
        ),
        ({"format": "gemv", "version": None}, "format of config.json is 'gemv': .* quantise the original again"),
        ({"backend": "llm-awq"}, "backend of config.json is 'llm-awq': .* quantise the original again"),
        ({"zero_point": "no"}, "zero_point of config.json is 'no': known are true, false"),
        ({"group_size": -2}, "group_size of config.json is -2"),
    ],
)
def test_configurations(tmp_path: pathlib.Path, change: Mapping[str, Any], sentence: str) -> None:
    with refused(sentence):
        weights_of(tmp_path, made()[0], {**CONFIG, **change})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"a.qzeros": np.zeros((1, 2), np.int32)}, r"'a.qzeros' .* asks \[2, 2\]"),
        ({"a.scales": np.zeros((2, 8), np.float16)}, r"'a.scales' .* asks \[2, 16\]"),
        ({"a.qweight": np.zeros((INPUTS, 2), np.uint32)}, "is stored as U32 where its format has I32"),
    ],
)
def test_tensors(tmp_path: pathlib.Path, change: Mapping[str, np.ndarray], sentence: str) -> None:
    with refused(sentence):
        weights_of(tmp_path, {**made()[0], **change}, CONFIG)
