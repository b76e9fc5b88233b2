"""Choice of the format adapter that reads a checkpoint."""

import pathlib
from typing import Any

import numpy as np
import pytest

from jaxinfer.weights import open_checkpoint
from jaxinfer.weights.formats import quantized_weights
from tests.weights.files import refused
from tests.weights.formats import test_awq
from tests.weights.formats.checkpoints import save

TENSORS = {
    "a_blocks": np.zeros((1, 2, 1, 16), np.uint8),
    "a_scales": np.zeros((1, 2, 1), np.uint8),
    "norm.weight": np.ones(3, np.float32),
}
MXFP4 = {"quant_method": "mxfp4"}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": MXFP4},
        {"compression_config": MXFP4},
        {"text_config": {"quantization_config": MXFP4}},
        {"quantization_config": None, "compression_config": MXFP4},
    ],
)
def test_where_it_stands(tmp_path: pathlib.Path, config: dict[str, Any]) -> None:
    save(tmp_path, TENSORS)
    weights, consumed = quantized_weights(open_checkpoint(tmp_path), config)
    assert weights.keys() == {"a"}
    assert consumed == {"a_blocks", "a_scales"}


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}, {"text_config": 1}])
def test_nothing_is_said(tmp_path: pathlib.Path, config: dict[str, Any]) -> None:
    save(tmp_path, TENSORS)
    assert quantized_weights(open_checkpoint(tmp_path), config) == ({}, set())


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("fp8", "quantization_config of config.json is not an object"),
        (
            {"quant_method": "hqq"},
            "quant_method of config.json is 'hqq': known are auto-round, awq, bitsandbytes, compr",
        ),
        ({"quant_method": ["fp8"]}, "quant_method of config.json is .* known are"),
        ({"bits": 4}, "quantization_config.quant_method of config.json is absent: known are"),
        ({"quant_method": "fp8"}, "config.json says fp8, but .* holds no weight of this format"),
    ],
)
def test_what_is_refused(tmp_path: pathlib.Path, config: Any, sentence: str) -> None:
    save(tmp_path, TENSORS)
    with refused(sentence):
        quantized_weights(open_checkpoint(tmp_path), {"quantization_config": config})


def test_a_weight_that_is_there_twice_is_refused(tmp_path: pathlib.Path) -> None:
    tensors, _ = test_awq.made()
    save(tmp_path, {**tensors, "a.weight": np.ones((test_awq.OUT, test_awq.INPUTS), np.float32)})
    with refused("holds weights quantised and plain as well: 'a.weight'"):
        quantized_weights(open_checkpoint(tmp_path), {"quantization_config": test_awq.CONFIG})
