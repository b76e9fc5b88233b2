"""ModelOpt's exports against their definition, and rejected checkpoints."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.quant.layouts import Grouped
from jaxinfer.weights.open import open_model_files
from tests.weights.files import refused
from tests.weights.formats.checkpoints import numbers, weights_of

OUT, INPUTS = 12, 48
RNG = np.random.default_rng(0)
FP8 = ml_dtypes.float8_e4m3fn
CODES = RNG.uniform(-448, 448, (OUT, INPUTS)).astype(FP8)
ONE = np.full((), 0.25, np.float32)
NIBBLES = RNG.integers(0, 256, (OUT, INPUTS // 2), np.uint8)
FP4 = {
    "a.weight": NIBBLES,
    "a.weight_scale": RNG.uniform(1, 448, (OUT, INPUTS // 16)).astype(FP8),
    "a.weight_scale_2": np.full((), 0.003, np.float32),
    "a.input_scale": ONE,
}


def config(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


@pytest.mark.parametrize("scale", [ONE, np.linspace(0.1, 1, OUT, dtype=np.float32)])
def test_fp8(tmp_path: pathlib.Path, scale: np.ndarray) -> None:
    tensors = {"a.weight": CODES, "a.weight_scale": scale, "a.input_scale": ONE, "a.k_scale": ONE}
    weights, consumed = weights_of(tmp_path, tensors, config("FP8", kv_cache_quant_algo="FP8"))
    assert consumed == tensors.keys()
    np.testing.assert_array_equal(numbers(weights["a.weight"]), CODES.astype(np.float32) * scale.reshape(-1, 1))
    layout = weights["a.weight"].layout
    assert isinstance(layout, Grouped)
    assert (layout.static, layout.activations) == (True, "float8_e4m3fn")
    assert weights["a.weight"].read("input_scale") == ONE


def test_fp8_with_inputs_scaled_token_by_token(tmp_path: pathlib.Path) -> None:
    tensors = {"a.weight": CODES, "a.weight_scale": np.ones(OUT, np.float32)}
    layout = weights_of(tmp_path, tensors, config("FP8_PER_CHANNEL_PER_TOKEN"))[0]["a.weight"].layout
    assert isinstance(layout, Grouped)
    assert (layout.static, layout.activations) == (False, "float8_e4m3fn")


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_nvfp4(tmp_path: pathlib.Path, algorithm: str) -> None:
    weights, consumed = weights_of(tmp_path, FP4, config(algorithm))
    assert consumed == FP4.keys()
    pairs = np.stack([NIBBLES & 15, NIBBLES >> 4], -1).reshape(OUT, INPUTS)
    values = pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = FP4["a.weight_scale"].astype(np.float32) * FP4["a.weight_scale_2"]
    np.testing.assert_allclose(numbers(weights["a.weight"]), values * np.repeat(scales, 16, 1), rtol=5e-7)


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("INT4_AWQ", {}, "quant_algo of config.json is 'INT4_AWQ': known are FP8"),
        ("NVFP4", {"a.weight_scale_2": np.zeros((), np.float32)}, "not a positive number"),
        ("NVFP4", {"a.weight": NIBBLES[:, :-1]}, "no groups of 16"),
        ("NVFP4", {"a.weight_scale": FP4["a.weight_scale"][:-1]}, "a.weight_scale"),
        ("FP8", {}, "a.weight.* is stored as U8"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: pathlib.Path, algorithm: str, changes: Any, message: str) -> None:
    with refused(message):
        weight = weights_of(tmp_path, {**FP4, **changes}, config(algorithm))[0]["a.weight"]
        weight.read("divisor")


def test_an_older_export_says_it_in_a_file_of_its_own(tmp_path: pathlib.Path) -> None:
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    files = open_model_files(tmp_path)
    assert files.quantized_by == "hf_quant_config.json"
    assert files.config_json["quantization_config"]["quant_algo"] == "FP8"
