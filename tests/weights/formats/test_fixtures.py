"""Checkpoints written by other tools: every dequantised tensor is bitwise identical."""

import hashlib
import json
import pathlib

import numpy as np
import pytest

from jaxinfer.weights import open_checkpoint
from jaxinfer.weights.formats import quantized_weights
from tests.weights.formats.checkpoints import config_of, numbers

FIXTURES = (
    "awq-gemm-g128",
    "bnb-fp4-dq",
    "bnb-int8",
    "bnb-nf4-dq",
    "bnb-nf4-nodq",
    "ct-fp8-dynamic",
    "ct-fp8-static",
    "ct-mxfp4a16",
    "ct-nvfp4a16",
    "ct-w4a16-g128",
    "ct-w8a8-smoothquant",
    "fp8-block128-weight_scale_inv",
    "gptq-3bit-g128-asym",
    "gptq-8bit-g128-sym",
    "gptq-g128-sym",
    "gptq-g64-asym-v2",
    "gptq-g64-sym-descact",
    "mxfp4-gpt-oss",
)


def test_no_fixture_is_left_out(test_data: pathlib.Path) -> None:
    folders = (test_data / "models" / "quantised").glob("*/model.safetensors")
    assert {path.parent.name for path in folders} == set(FIXTURES)


@pytest.mark.parametrize("name", FIXTURES)
def test_every_tensor_bit_for_bit(test_data: pathlib.Path, name: str) -> None:
    folder = test_data / "models" / "quantised" / name
    expected = json.loads((folder / "MADE_BY.json").read_text())["sha256_of_dequantised_f32_le_bytes"]
    checkpoint = open_checkpoint(folder)
    weights, consumed = quantized_weights(checkpoint, config_of(folder))
    plain = checkpoint.tensors.keys() - consumed
    assert plain | weights.keys() == expected.keys()
    wrong = []
    for tensor, entry in expected.items():
        value = numbers(weights[tensor]) if tensor in weights else checkpoint.read(tensor).astype(np.float32)
        # experts were recorded as [experts, in, out]
        value = value.swapaxes(1, 2) if value.ndim == 3 else value
        assert list(value.shape) == entry["shape"]
        if hashlib.sha256((np.ascontiguousarray(value) + np.float32(0)).tobytes()).hexdigest() != entry["sha256"]:
            wrong.append(tensor)
    assert not wrong
