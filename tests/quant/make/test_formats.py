"""Quantised weights, written in each format and read back by the adapters that also read the files of other tools."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant.make.formats import config_of, packed, tensors_of
from jaxinfer.quant.make.recipe import Recipe, RecipeError
from jaxinfer.weights.formats import quantized_weights
from jaxinfer.weights.safetensors.checkpoint import open_checkpoint
from jaxinfer.weights.safetensors.writer import write_tensors
from tests.quant.make.references import correlated

CASES = {
    "int8": (Recipe("int8"), 96),
    "int8 inputs": (Recipe("int8", activations=True), 96),
    "fp8": (Recipe("fp8"), 96),
    "fp8 inputs": (Recipe("fp8", activations=True), 96),
    "fp8 blocks": (Recipe("fp8", blocks=True), 256),
    "int4": (Recipe("int4", group_size=32), 96),
    "int4 channels": (Recipe("int4", group_size=-1), 96),
    "int4 zeros": (Recipe("int4", group_size=32, symmetric=False), 96),
    "int4 short group": (Recipe("int4", group_size=64, symmetric=False), 96),
    "gptq": (Recipe("gptq", group_size=32), 96),
    "gptq zeros": (Recipe("gptq", group_size=32, symmetric=False), 96),
    "gptq order": (Recipe("gptq", group_size=32, symmetric=False, act_order=True), 96),
    "gptq order, short group": (Recipe("gptq", group_size=64, act_order=True), 96),
    "gptq 3 bits": (Recipe("gptq", bits=3, group_size=32, symmetric=False), 96),
    "gptq 8 bits": (Recipe("gptq", bits=8, group_size=32, symmetric=False), 96),
    "gptq packed": (
        Recipe("gptq", group_size=32, act_order=True, static_groups=True, weight_format="compressed-tensors"),
        96,
    ),
    "awq": (Recipe("awq", group_size=32), 96),
    "awq short group": (Recipe("awq", group_size=64), 96),
    "awq packed": (Recipe("awq", group_size=32, symmetric=True, weight_format="compressed-tensors"), 96),
    "nf4": (Recipe("nf4", nested=False), 96),
    "nf4 nested": (Recipe("nf4"), 172),
    "fp4 nested": (Recipe("fp4"), 96),
    "mxfp4": (Recipe("mxfp4"), 96),
}


def test_a_short_last_group_is_asked_for():
    """compressed-tensors and AutoAWQ reject short last groups; the group index of GPTQ allows them."""
    assert "groups of 64 do not divide its 96 inputs" in Recipe("int4", group_size=64).refusal(32, 96)
    assert "groups of 64 do not divide its 96 inputs" in Recipe("awq", group_size=64).refusal(32, 96)
    assert not Recipe("int4", group_size=64, short_groups=True).refusal(32, 96)
    assert not Recipe("gptq", group_size=64).refusal(32, 96)
    assert not Recipe("int4", group_size=-1).refusal(32, 96)


# Cases that differ in how weights are made, not in how they are written, take seconds to compile.
SLOW = {"gptq", "gptq order", "gptq packed", "awq", "nf4", "fp8 inputs"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_what_is_written_is_read_back(name: str, tmp_path: pathlib.Path):
    recipe, inputs = CASES[name]
    x = correlated(300, inputs, seed=1)
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(160, inputs)) * 0.1 + 0.02, jnp.float32)
    made = recipe.made(weight, jnp.asarray(x.T @ x, jnp.float32) if recipe.gram else None, "bfloat16")
    stored = recipe.stored("bfloat16")
    write_tensors(tmp_path / "model.safetensors", tensors_of("block.0.up", made, stored))
    config = json.loads(json.dumps({"quantization_config": config_of(stored, ["block.0.gate"], ["up"])}))
    read, _ = quantized_weights(open_checkpoint(tmp_path), config)
    assert list(read) == ["block.0.up.weight"]
    own = read["block.0.up.weight"]
    assert own.shape == weight.shape
    assert np.array_equal(own.dense(), np.asarray(made.dequantize()))
    if "order" not in made.parts:  # columns may be reordered within a group
        assert np.array_equal(own.read("codes").astype(np.float32), np.asarray(made.parts["codes"]).astype(np.float32))
    assert getattr(own.layout, "activations", "") == getattr(made.layout, "activations", "")


def test_words_are_one_stream_of_bits():
    fields = np.arange(64, dtype=np.uint8)[None] % 8
    stream = int.from_bytes(packed(fields, 3).tobytes(), "little")
    assert [stream >> (3 * place) & 7 for place in range(64)] == fields[0].tolist()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"method": "int5"}, "must be one of int8"),
        ({"method": "gptq", "bits": 5}, "--bits 5 of gptq"),
        ({"method": "awq", "bits": 8}, "--bits 8 of awq"),
        ({"method": "awq", "symmetric": True}, "has zero points"),
        ({"method": "nf4", "weight_format": "gptq"}, "cannot be written as 'gptq'"),
        ({"method": "gptq", "group_size": 0}, "--group-size"),
        ({"method": "gptq", "act_order": True, "weight_format": "compressed-tensors"}, "needs the format gptq"),
        ({"method": "smoothquant", "alpha": 1.5}, "--alpha 1.5"),
        ({"method": "gptq", "damp": 0.0}, "--damp 0.0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict, sentence: str):
    with pytest.raises(RecipeError, match=sentence):
        Recipe(**settings)
