"""auto-round: each way in which its releases declare how weights are packed.

The packers of 0.16.1 were compared by hand, bitwise: 2 to 8 bits, zero points stored as they are and minus one.
"""

import pathlib
from typing import Any

import numpy as np
import pytest

from tests.weights.files import refused
from tests.weights.formats import test_awq
from tests.weights.formats.checkpoints import numbers, weights_of
from tests.weights.formats.test_gptq import OUT, as_version_1, made

CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int", "iters": 0}
FIRST = [
    {},
    {"packing_format": "auto_round:auto_gptq"},
    {"quant_method": None, "method": "intel/auto-round"},
    {"packing_format": "auto_round:gptq", "backend": "auto", "act_bits": 16},
    {"packing_format": "auto_gptq", "quant_method": "auto_round"},
    {"packing_format": "auto_round:auto_gptq:exllamav2", "block_name_to_quantize": ["model.layers"]},
    {"backend": "auto_round:gptq:exllamav2", "quant_method": "intel/auto-round"},
]
SECOND = [
    {"packing_format": "auto_round"},
    {"packing_format": "auto_round:gptqmodel"},
    {"packing_format": "auto_round:exllamav2"},
    {"backend": "auto_round:tritonv2", "quant_method": "intel/auto-round"},
]


@pytest.mark.parametrize(("version", "said"), [*((1, said) for said in FIRST), *((2, said) for said in SECOND)])
@pytest.mark.parametrize("bits", [3, 4, 5, 7, 8])
def test_as_gptq_packs(tmp_path: pathlib.Path, bits: int, version: int, said: dict[str, Any]) -> None:
    tensors, expected = made(bits)
    del tensors["a.g_idx"]
    if version == 1:
        tensors["a.qzeros"] = as_version_1(tensors["a.qzeros"], bits, OUT)
    weight = weights_of(tmp_path, tensors, {**CONFIG, "bits": bits, **said})[0]["a.weight"]
    np.testing.assert_array_equal(numbers(weight), expected)


@pytest.mark.parametrize("packing", ["auto_round:auto_awq", "auto_round:awq", "auto_awq", "awq"])
def test_as_awq_packs(tmp_path: pathlib.Path, packing: str) -> None:
    tensors, expected = test_awq.made()
    weights, _ = weights_of(tmp_path, tensors, {**CONFIG, "packing_format": packing, "sym": True})
    np.testing.assert_array_equal(numbers(weights["a.weight"]), expected)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            {"packing_format": "auto_round:llm_compressor"},
            "packing_format of config.json is 'auto_round:llm",
        ),
        ({"packing_format": "auto_round:fp8_static"}, "packing_format of config.json is"),
        ({"backend": "auto_round:marlin"}, "backend of config.json is 'auto_round:marlin'"),
        ({"data_type": "mx_fp"}, "data_type of config.json is 'mx_fp': known are int"),
        ({"act_bits": 8}, "act_bits of config.json is 8: known are 16"),
        ({"rotation_config": {"mode": "hadamard"}}, "rotation_config of config.json is"),
        ({"group_size": 0}, "group_size of config.json is 0"),
        ({"bits": 16}, "bits of config.json is 16"),
        ({"sym": True}, "qzeros.* holds zero points other than 8"),
    ],
)
def test_configurations(tmp_path: pathlib.Path, said: dict[str, Any], sentence: str) -> None:
    with refused(sentence):
        weights_of(tmp_path, made(4)[0], {**CONFIG, **said})[0]["a.weight"].read("scales")
