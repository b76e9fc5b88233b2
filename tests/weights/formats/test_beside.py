"""Folders that declare the quantisation in a file next to config.json."""

import json
import logging
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxinfer.weights.files import open_files
from jaxinfer.weights.sidecar import copy_companions
from tests.weights.files import refused
from tests.weights.formats import test_awq, test_gptq
from tests.weights.formats.checkpoints import numbers, save

AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False, "checkpoint_format": "gptq_v2"}


def written(folder: pathlib.Path, tensors: dict[str, np.ndarray], **files: Any) -> pathlib.Path:
    save(folder, tensors)
    for name, value in {"config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("files", "made"),
    [
        ({"quantize_config": GPTQ}, test_gptq.made(4)),
        ({"quant_config": AWQ}, test_awq.made()),
        ({"quantize_config": AWQ}, test_awq.made()),
        ({"quantize_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}, test_awq.made()),
        ({"quant_config": {**GPTQ, "quant_method": "gptq"}}, test_gptq.made(4)),
        ({"config": {"quantization_config": None}, "quantize_config": GPTQ}, test_gptq.made(4)),
        # config.json takes precedence
        ({"config": {"quantization_config": AWQ}, "quantize_config": GPTQ}, test_awq.made()),
        (
            {"config": {"text_config": {"quantization_config": {**GPTQ, "method": "gptq"}}}, "quant_config": AWQ},
            test_gptq.made(4),
        ),
    ],
)
def test_where_it_is_said(tmp_path: pathlib.Path, files: dict[str, Any], made: Any) -> None:
    tensors, expected = made
    opened = open_files(written(tmp_path, tensors, **files))
    if "text_config" in opened.config_json:  # a wrapper's config, which is merged with its text_config
        opened = open_files(written(tmp_path, tensors, config=opened.config_json["text_config"]))
    assert opened.quantized
    specs = opened._stored[0]
    np.testing.assert_array_equal(numbers(specs["a.weight"]), expected)


def test_an_error_names_the_file(tmp_path: pathlib.Path) -> None:
    opened = open_files(written(tmp_path, test_gptq.made(4)[0], quantize_config={**GPTQ, "bits": 9}))
    with refused("^bits of quantize_config.json is 9: known are 2, 3, 4, 8"):
        opened.checkpoint({})


@pytest.mark.parametrize("text", ["[1]", "{", "1", ""])
def test_a_file_that_is_no_object(tmp_path: pathlib.Path, text: str) -> None:
    written(tmp_path, test_gptq.made(4)[0])
    (tmp_path / "quantize_config.json").write_text(text)
    with refused(r"quantize_config.json is not "):
        open_files(tmp_path)


@pytest.mark.parametrize("said", [GPTQ, {"some": "thing"}, {"quant_method": "hqq"}, {**GPTQ, "bits": 9}])
def test_a_file_of_other_weights_is_passed_over(
    said: dict[str, Any], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A dequantised model may still have the quantisation file."""
    opened = open_files(written(tmp_path, {"a.weight": np.ones((2, 2), np.float32)}, quantize_config=said))
    with caplog.at_level(logging.WARNING, logger="jaxinfer"):
        assert not opened.quantized
    assert ["quantize_config.json" in record.getMessage() for record in caplog.records] == [True]
    np.testing.assert_array_equal(opened.checkpoint({}).read("a.weight"), np.ones((2, 2)))


def test_a_folder_that_is_made_describes_its_own_weights(tmp_path: pathlib.Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "from").mkdir()
    kept, left = ("generation_config.json",), ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
    for name in (*kept, *left, "config.json"):
        (tmp_path / "from" / name).write_text("{}")
    copy_companions(tmp_path / "from", tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == [*kept]
