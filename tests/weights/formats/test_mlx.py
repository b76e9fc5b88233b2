"""Handmade MLX checkpoints: every bit width and mode by definition, per-module settings, and rejected ones."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.weights.formats.mlx import described
from jaxinfer.weights.open import open_model_files
from tests.weights.files import refused
from tests.weights.formats.checkpoints import numbers, pack, weights_of

OUT, INPUTS = 6, 128
RNG = np.random.default_rng(0)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "mlx", "group_size": 64, "bits": 4, **changes}


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    rows = codes.reshape(-1, codes.shape[-1])
    return pack(rows, bits).view(np.uint32).reshape(*codes.shape[:-1], -1)


def affine(
    name: str, bits: int, group: int, outs: tuple[int, ...] = (OUT,), dtype: Any = ml_dtypes.bfloat16
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return tensors, and the weight by MLX's documentation: scale * code + bias, here in float32."""
    codes = RNG.integers(0, 1 << bits, (*outs, INPUTS))
    scales, biases = (RNG.normal(0, 0.1, (*outs, INPUTS // group)).astype(dtype) for _ in range(2))
    by_code = [np.repeat(value.astype(np.float32), group, axis=-1) for value in (scales, biases)]
    tensors = {f"{name}.weight": packed(codes, bits), f"{name}.scales": scales, f"{name}.biases": biases}
    return tensors, codes.astype(np.float32) * by_code[0] + by_code[1]


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_with_scales_and_biases(tmp_path: pathlib.Path, bits: int, group: int) -> None:
    tensors, expected = affine("a", bits, group)
    weights, consumed = weights_of(tmp_path, tensors, config(bits=bits, group_size=group))
    assert consumed == tensors.keys()
    layout: Any = weights["a.weight"].layout
    kind = "int4" if bits <= 4 else "int8"
    assert (layout.codes, layout.group, layout.scales, layout.biased) == (kind, group, "bfloat16", 1 << (bits - 1))
    np.testing.assert_array_equal(numbers(weights["a.weight"]), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_dtypes_of_scales(tmp_path: pathlib.Path, dtype: Any) -> None:
    tensors, expected = affine("a", 4, 64, dtype=dtype)
    weight = weights_of(tmp_path, tensors, config())[0]["a.weight"]
    assert weight.layout.parts(INPUTS)["biases"].dtype == np.dtype(dtype).name
    np.testing.assert_array_equal(numbers(weight), expected)


def test_experts_are_one_tensor(tmp_path: pathlib.Path) -> None:
    tensors, expected = affine("a.switch_mlp.up_proj", 4, 64, (3, OUT))
    weights, _ = weights_of(tmp_path, tensors, config())
    np.testing.assert_array_equal(numbers(weights["a.switch_mlp.up_proj.weight"]), expected)


def floats(mode: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    group, bits = (16 if mode == "nvfp4" else 32), (8 if mode == "mxfp8" else 4)
    codes = RNG.integers(0, 1 << bits, (OUT, INPUTS))
    codes[codes & 0x7F == 0x7F] = 0  # codes of NaN
    if mode == "nvfp4":
        scales = RNG.uniform(0.01, 2, (OUT, INPUTS // group)).astype(ml_dtypes.float8_e4m3fn)
        factors = scales.astype(np.float32)
    else:
        scales = RNG.integers(120, 130, (OUT, INPUTS // group)).astype(np.uint8)
        factors = np.exp2(scales.astype(np.float32) - 127)
    values = E2M1[codes] if bits == 4 else codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    tensors = {"a.weight": packed(codes, bits), "a.scales": scales.view(np.uint8)}
    return tensors, values * np.repeat(factors, group, axis=-1)


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_floats(tmp_path: pathlib.Path, mode: str, bits: int, group: int) -> None:
    tensors, expected = floats(mode)
    weights, consumed = weights_of(tmp_path, tensors, config(mode=mode, bits=bits, group_size=group))
    assert consumed == tensors.keys()
    np.testing.assert_array_equal(numbers(weights["a.weight"]), expected)


def test_modules_that_differ(tmp_path: pathlib.Path) -> None:
    """A module that names no mode is affine under any global mode; its bits and group size default likewise."""
    first, expected_first = floats("mxfp4")
    second, expected_second = affine("b", 8, 64)
    third, expected_third = affine("c.d", 6, 32)
    plain = {"e.weight": np.ones((3, 5), np.float32)}
    said = config(mode="mxfp4", group_size=32, b={"bits": 8}, a=True, e=False)
    said["c.d"] = {"group_size": 32, "bits": 6}
    weights, consumed = weights_of(tmp_path, {**first, **second, **third, **plain}, said)
    assert consumed == {*first, *second, *third}
    for name, expected in (("a", expected_first), ("b", expected_second), ("c.d", expected_third)):
        np.testing.assert_array_equal(numbers(weights[f"{name}.weight"]), expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bits": 7}, "^quantization.bits of config.json is 7: known are 4, 2, 3, 5, 6, 8"),
        ({"group_size": 256}, "quantization.group_size of config.json is 256: known are 64, 32, 128"),
        ({"mode": "int4"}, "quantization.mode of config.json is 'int4': known are affine, mxfp4, mxfp8, nvfp4"),
        ({"mode": "mxfp4"}, "quantization.group_size of config.json is 64: known are 32"),
        ({"a": {"bits": 16}}, "quantization.a.bits of config.json is 16"),
        ({"a": False}, "quantization.a of config.json is False: known are an object"),
        ({"bits": 8}, r"'a.scales' .* has shape \[6, 2\] where its format asks \[6, 1\]"),
        ({"bits": 3}, "'a.weight' .* has 16 words a row, which are no groups of 64 fields of 3 bits"),
    ],
)
def test_configurations(tmp_path: pathlib.Path, change: dict[str, Any], sentence: str) -> None:
    with refused(sentence):
        weights_of(tmp_path, affine("a", 4, 64)[0], config(**change))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("a.weight", None, "lacks tensor 'a.weight'"),
        ("a.biases", None, "lacks tensor 'a.biases'"),
        ("a.biases", np.zeros((OUT, 2), np.float32), "'a.biases' .* is stored as F32 where its format has BF16"),
        ("a.weight", np.zeros((OUT, 16), np.int32), "'a.weight' .* is stored as I32 where its format has U32"),
        ("a.weight", np.zeros(16, np.uint32), r"'a.weight' .* has shape \[16\]"),
        ("a.scales", np.full((OUT, 2), np.inf, ml_dtypes.bfloat16), "'a.scales' .* NaN or infinite"),
    ],
)
def test_tensors(tmp_path: pathlib.Path, name: str, value: np.ndarray | None, sentence: str) -> None:
    tensors = {**affine("a", 4, 64)[0], name: value}
    with refused(sentence):
        kept = {name: value for name, value in tensors.items() if value is not None}
        weights_of(tmp_path, kept, config())[0]["a.weight"].read("scales")


def test_experts_with_biases_are_refused(tmp_path: pathlib.Path) -> None:
    tensors, _ = affine("a.experts.up_proj", 4, 64, (3, OUT))
    with refused("'a.experts.up_proj.weight' .* holds experts with biases, which are not read: take the original"):
        weights_of(tmp_path, {**tensors, "a.experts.up_proj.bias": np.zeros((3, OUT), np.float32)}, config())


def test_where_a_folder_says_it(tmp_path: pathlib.Path) -> None:
    """mlx-lm writes the config under two names, one of them the key of other formats without a ``quant_method``."""
    said = {"group_size": 64, "bits": 4}
    whole = {"architectures": ["A"], "quantization": said, "quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    files = open_model_files(tmp_path)
    assert files.quantized
    assert files.config_json == {"architectures": ["A"], "quantization_config": config()}


@pytest.mark.parametrize("other", [None, "gptq", {"bits": 4}, {"quantization": {"bits": 4, "group_size": 64}}])
def test_other_things_of_this_name(other: Any) -> None:
    whole = {"quantization": other, "quantization_config": {"quant_method": "gptq"}}
    assert described(whole) == whole
