"""compressed-tensors: handmade checkpoints for cases without a fixture, and rejected ones."""

import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.quant.layouts import Grouped
from tests.weights.files import refused
from tests.weights.formats.checkpoints import numbers, pack, weights_of

OUT, INPUTS, SIZE = 12, 40, 16
RNG = np.random.default_rng(0)
FP8 = ml_dtypes.float8_e4m3fn
CODES = RNG.uniform(-448, 448, (OUT, INPUTS)).astype(FP8)
PACKED = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": SIZE, "symmetric": False}
FLOAT = {"type": "float", "num_bits": 8, "strategy": "channel"}
INT8 = {"type": "int", "num_bits": 8, "strategy": "channel"}
TOKENS = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}


def config(form: str, weights: Mapping[str, Any], inputs: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


def packed(bits: int, index: np.ndarray | None = None) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return tensors of an asymmetric weight with a shorter last group, and the weight by definition."""
    rng = np.random.default_rng(bits)
    groups = -(-INPUTS // SIZE)
    codes = rng.integers(0, 2**bits, (OUT, INPUTS))
    zeros = rng.integers(0, 2**bits, (OUT, groups))
    scales = rng.uniform(0.01, 0.1, (OUT, groups)).astype(ml_dtypes.bfloat16)
    group_of = np.arange(INPUTS) // SIZE if index is None else index
    weight = np.empty((OUT, INPUTS), np.float32)
    for o, i in np.ndindex(OUT, INPUTS):
        weight[o, i] = np.float32(codes[o, i] - zeros[o, group_of[i]]) * np.float32(scales[o, group_of[i]])
    tensors = {
        "a.weight_packed": pack(codes, bits),
        "a.weight_zero_point": pack(zeros.T, bits).T,
        "a.weight_scale": scales,
        "a.weight_shape": np.array([OUT, INPUTS]),
    }
    return tensors if index is None else {**tensors, "a.weight_g_idx": index.astype(np.int32)}, weight


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_asymmetric_packed_ones(tmp_path: pathlib.Path, bits: int, ordered: bool) -> None:
    index = np.random.default_rng(0).permutation(np.arange(INPUTS) // SIZE) if ordered else None
    tensors, expected = packed(bits, index)
    weights, consumed = weights_of(tmp_path, tensors, config("pack-quantized", {**PACKED, "num_bits": bits}))
    assert consumed == tensors.keys()
    assert weights["a.weight"].layout.ordered == ordered
    np.testing.assert_array_equal(numbers(weights["a.weight"]), expected)


@pytest.mark.parametrize(("strategy", "shape"), [("channel", (OUT, 1)), ("tensor", (1,)), ("tensor", ())])
def test_packed_ones_with_few_scales(tmp_path: pathlib.Path, strategy: str, shape: tuple[int, ...]) -> None:
    codes = RNG.integers(0, 16, (OUT, INPUTS - 3))  # the last word is not full
    scales = RNG.uniform(0.1, 1, shape).astype(np.float32)
    tensors = {
        "a.weight_packed": pack(codes, 4),
        "a.weight_scale": scales,
        "a.weight_shape": np.array([OUT, INPUTS - 3]),
    }
    kind = {"type": "int", "num_bits": 4, "strategy": strategy}
    weight = weights_of(tmp_path, tensors, config("pack-quantized", kind))[0]["a.weight"]
    np.testing.assert_array_equal(numbers(weight), (codes - 8).astype(np.float32) * scales)


@pytest.mark.parametrize("block", [[8, 16], "8x16"])
def test_blocks(tmp_path: pathlib.Path, block: Any) -> None:
    scales = RNG.uniform(0.001, 0.01, (2, 3)).astype(np.float32)
    kind = {**FLOAT, "strategy": "block", "block_structure": block}
    inputs = {**TOKENS, "strategy": "group", "group_size": 16}
    tensors = {"a.weight": CODES, "a.weight_scale": scales}
    weight = weights_of(tmp_path, tensors, config("float-quantized", kind, inputs))[0]["a.weight"]
    expected = [[np.float32(CODES[o, i]) * scales[o // 8, i // 16] for i in range(INPUTS)] for o in range(OUT)]
    np.testing.assert_array_equal(numbers(weight), np.array(expected))
    assert weight.layout == Grouped("float8_e4m3fn", 8, activations="float8_e4m3fn", activation_group=16)


def test_asymmetric_integers(tmp_path: pathlib.Path) -> None:
    codes, zeros = RNG.integers(-128, 128, (OUT, INPUTS), np.int8), RNG.integers(-20, 20, (OUT, 1), np.int8)
    scales = RNG.uniform(0.1, 1, (OUT, 1)).astype(np.float32)
    tensors = {"a.weight": codes, "a.weight_scale": scales, "a.weight_zero_point": zeros}
    kind = {**INT8, "symmetric": False}
    weight = weights_of(tmp_path, tensors, config("naive-quantized", kind))[0]["a.weight"]
    np.testing.assert_array_equal(numbers(weight), (codes.astype(np.float32) - zeros) * scales)


@pytest.mark.parametrize(
    ("inputs", "activations", "group", "static"),
    [
        (None, "", 0, False),
        (TOKENS, "float8_e4m3fn", 0, False),
        ({**TOKENS, "strategy": "tensor", "dynamic": False}, "float8_e4m3fn", 0, True),
        ({**TOKENS, "strategy": "group", "group_size": 8}, "float8_e4m3fn", 8, False),
        ({**TOKENS, "strategy": "tensor"}, "", 0, False),  # one scale per batch would make results depend on the batch
        ({**TOKENS, "symmetric": False}, "", 0, False),
        ({**TOKENS, "type": "int"}, "", 0, False),
        ({**TOKENS, "num_bits": 4}, "", 0, False),
    ],
)
def test_activations(tmp_path: pathlib.Path, inputs: Any, activations: str, group: int, static: bool) -> None:
    scale = np.ones(1, np.float32)
    tensors = {"a.weight": CODES, "a.weight_scale": np.ones((OUT, 1), np.float32), "a.input_scale": scale}
    weight = weights_of(tmp_path, tensors, config("float-quantized", FLOAT, inputs))[0]["a.weight"]
    layout = weight.layout
    assert isinstance(layout, Grouped)
    assert (layout.activations, layout.activation_group, layout.static) == (activations, group, static)


def test_nvfp4_with_activations(tmp_path: pathlib.Path) -> None:
    codes = RNG.integers(0, 256, (OUT, 16), np.uint8)
    scales = RNG.uniform(1, 448, (OUT, 2)).astype(FP8)
    tensors = {
        "a.weight_packed": codes,
        "a.weight_scale": scales,
        "a.weight_global_scale": np.full(1, 300, np.float32),
        "a.input_global_scale": np.ones(1, np.float32),
    }
    kind = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    inputs = {**kind, "dynamic": "local"}
    weights, consumed = weights_of(tmp_path, tensors, config("nvfp4-pack-quantized", kind, inputs))
    assert consumed == tensors.keys()
    values = np.stack([codes & 15, codes >> 4], -1).reshape(OUT, 32).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    expected = values * np.repeat(scales.astype(np.float32) / np.float32(300), 16, 1)
    np.testing.assert_array_equal(numbers(weights["a.weight"]), expected)
    with refused("'a.weight_global_scale' .* is 0.0, not a positive number"):
        weights_of(
            tmp_path, {**tensors, "a.weight_global_scale": np.zeros(1, "f4")}, config("nvfp4-pack-quantized", kind)
        )[0]["a.weight"].read("divisor")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("weight_packed", None, "lacks tensor 'a.weight_packed'"),
        ("weight_shape", np.array([OUT, INPUTS + 1]), "says .12, 41., which 12 rows of 5 words do not hold"),
        ("weight_shape", np.array([OUT, -5]), "says .12, -5."),
        ("weight_shape", np.array([OUT, 2**62]), "says .12, 4611686018427387904."),
        ("weight_shape", np.array([OUT, INPUTS, 1]), r"'a.weight_shape' .* asks \[2\]"),
        ("weight_zero_point", np.zeros((OUT, 3), np.int32), r"'a.weight_zero_point' .* asks \[2, 3\]"),
        ("weight_zero_point", None, "lacks tensor 'a.weight_zero_point'"),
        ("weight_scale", np.ones((OUT, 2), np.float32), r"'a.weight_scale' .* asks \[12, 3\]"),
        ("weight_scale", np.full((OUT, 3), np.inf, np.float32), "NaN or infinite"),
        ("weight_g_idx", np.full(INPUTS, 3, np.int32), "'a.weight_g_idx' .* names groups 3 to 3 where"),
    ],
)
def test_tensors(tmp_path: pathlib.Path, name: str, value: np.ndarray | None, sentence: str) -> None:
    tensors = packed(4)[0]
    tensors = {key: tensor for key, tensor in tensors.items() if key != f"a.{name}"}
    if value is not None:
        tensors[f"a.{name}"] = value
    with refused(sentence):
        weights_of(tmp_path, tensors, config("pack-quantized", PACKED))[0]["a.weight"].read("scales")


@pytest.mark.parametrize(
    ("form", "kind", "inputs", "missing"),
    [
        ("float-quantized", FLOAT, {**TOKENS, "strategy": "tensor", "dynamic": False}, "a.input_scale"),
        (
            "nvfp4-pack-quantized",
            {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
            None,
            "a.weight_packed",
        ),
    ],
)
def test_tensors_of_another_format(
    tmp_path: pathlib.Path, form: str, kind: Mapping[str, Any], inputs: Any, missing: str
) -> None:
    with refused(f"lacks tensor '{missing}'"):
        weights_of(
            tmp_path,
            {"a.weight": CODES, "a.weight_scale": np.ones((OUT, 1), np.float32)},
            config(form, kind, inputs),
        )
