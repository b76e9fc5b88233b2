"""Folding scales into the preceding layer leaves the layer's output unchanged."""

import pathlib

import jax
import numpy as np
import pytest

from jaxinfer.quant.make.recipe import Recipe
from jaxinfer.quantize.calibration import observed, passed
from jaxinfer.quantize.fold import Folder, can_fold
from jaxinfer.quantize.layer import LayerWeights
from jaxinfer.types import walk_specs
from tests.quantize.models import samples
from tests.quantize.test_calibration import first_layer


def outputs(model, block, values, hidden) -> np.ndarray:
    after = hidden.copy()
    passed(model.module, block, values, after, samples())
    return after


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qwen2-bias", "awq"),
        ("qwen2-bias", "smoothquant"),
        ("qwen2_moe-hub", "smoothquant"),
        pytest.param("phi3-partial-hub", "awq", marks=pytest.mark.slow),
        pytest.param("qwen2_moe-hub", "awq", marks=pytest.mark.slow),
    ],
)
def test_a_folded_layer_computes_the_same(name: str, method: str, tmp_path: pathlib.Path):
    model, values, hidden = first_layer(name, tmp_path)
    hidden *= np.exp(np.random.default_rng(0).normal(size=hidden.shape[-1]))  # some inputs are much larger
    before = {path: value.copy() for path, value in values.items()}
    specs = dict(walk_specs(model.specs["layers_0"]))
    layer = LayerWeights(model.module.block(0, None), specs, values)
    assert can_fold(layer.block)
    paths = tuple(path for path, spec in specs.items() if spec.inputs is not None or path[-1] == "router")
    expected = outputs(model, layer.block, values, hidden)
    seen = observed(model.module, layer.block, values, paths, hidden, samples(), gram=True)
    recipe = Recipe(method, group_size=32)
    Folder(layer, seen, recipe, recipe.grid("float32")).fold()
    assert np.abs(outputs(model, layer.block, values, hidden) - expected).max() < 2e-4 * np.abs(expected).max()
    changed = {"/".join(path) for path, value in values.items() if not np.allclose(value, before[path], rtol=1e-3)}
    norms = {"attention_norm/scale", "attention/qkv", "mlp_norm/scale", "mlp/gate_up"}
    assert norms <= changed
    assert ("mlp/down" in changed) == ("attention/out" in changed) == (method == "awq")
    again = observed(model.module, layer.block, values, paths, hidden, samples(), gram=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-3, atol=2e-2), seen, again)


@pytest.mark.parametrize("name", ["gemma2-window", "gpt_oss-hub"])
def test_other_blocks_are_not_folded(name: str, tmp_path: pathlib.Path):
    """A norm that adds one to its scale, and clamped gates, through which no factor can be folded."""
    model, _, _ = first_layer(name, tmp_path)
    assert not can_fold(model.module.block(0, None))
