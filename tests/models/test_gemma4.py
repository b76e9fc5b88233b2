"""Gemma 3n and Gemma 4: config.json fields, rejected values, and state shared between layers."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import pytest

from jaxinfer.config import EngineConfigError
from jaxinfer.models.config import ConfigError
from jaxinfer.models.families.gemma3n import Gemma3nConfig
from jaxinfer.models.families.gemma4 import Gemma4Config
from jaxinfer.models.model import Model, abstract
from jaxinfer.parallel.heads import kv_copies
from jaxinfer.quant.banks import known_modules
from jaxinfer.types import LayerSpec

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs" / "models"
S, F = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 20,
    "layer_types": [S, F, S, F],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}


def gemma4(**changes: Any) -> Gemma4Config:
    return Gemma4Config.from_json({"model_type": "gemma4_text", **SIZES, "global_head_dim": 32, **changes})


def gemma3n(**changes: Any) -> Gemma3nConfig:
    return Gemma3nConfig.from_json({"model_type": "gemma3n_text", "num_kv_shared_layers": 0, **SIZES, **changes})


def published(name: str) -> Model:
    return abstract(json.loads((CONFIGS / f"{name}.json").read_text()), "bfloat16")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma4_vision"}, ["model_type", "gemma4_vision"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "all", "is no decoder"]),
        ({"hidden_size_per_layer_input": -1}, ["hidden_size_per_layer_input", "-1"]),
        ({"final_logit_softcapping": 0}, ["final_logit_softcapping", "0"]),
        ({"num_kv_shared_layers": 4}, ["num_kv_shared_layers", "4"]),
        ({"num_kv_shared_layers": 3}, ["num_kv_shared_layers", "3", "layer_types"]),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, ["num_attention_heads", "4", "3"]),
        ({"global_head_dim": 0}, ["global_head_dim", "0"]),
        ({"per_layer_config": {"1": {"window": 3}}}, ["per_layer_config", "window"]),
        ({"per_layer_config": {"1": {"head_dim": 24}}}, ["per_layer_config", "24", "all layers of a kind"]),
        ({"rope_parameters": {F: 3}}, ["rope_parameters", "3"]),
        ({"rope_parameters": {F: {"rope_type": "axial"}}}, ["rope_type", "axial"]),
        ({"enable_moe_block": True, "num_experts": 4}, ["top_k_experts", "missing"]),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, ["top_k_experts", "5", "4"]),
    ],
)
def test_a_bad_field_of_gemma4_is_named_with_its_value(changes: dict, words: list[str]):
    with pytest.raises(ConfigError) as error:
        gemma4(**changes)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": [48, 48]}, ["intermediate_size", "48", "4 layers"]),
        ({"activation_sparsity_pattern": [1.0] * 4}, ["activation_sparsity_pattern", "1.0"]),
        ({"activation_sparsity_pattern": [0.5]}, ["activation_sparsity_pattern", "0.5", "4"]),
        ({"altup_active_idx": 4}, ["altup_active_idx", "4"]),
        ({"hidden_size_per_layer_input": 0}, ["hidden_size_per_layer_input", "0"]),
        ({"laurel_rank": 0}, ["laurel_rank", "0"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "linear"]),
        ({"num_kv_shared_layers": None}, ["num_kv_shared_layers", "None"]),  # default: 15
    ],
)
def test_a_bad_field_of_gemma3n_is_named_with_its_value(changes: dict, words: list[str]):
    with pytest.raises(ConfigError) as error:
        gemma3n(**changes)
    assert all(word in str(error.value) for word in words), error.value


def test_layers_of_gemma4():
    near, wide = LayerSpec(20), LayerSpec(head_dim=32)
    assert gemma4().layers == (near, wide) * 2
    assert gemma4(layer_types=[S] * 4).layers == (near, near, near, wide), "the last one sees everything"
    own = gemma4(attention_k_eq_v=True, num_global_key_value_heads=1).layers
    assert own[1] == LayerSpec(head_dim=32, kv_heads=1)
    assert gemma4(num_global_key_value_heads=1).layers[1] == wide, "counts where keys are values alone"
    each = {layer: {"head_dim": 24, "num_key_value_heads": 4} for layer in ("1", "3")}
    assert gemma4(per_layer_config=each).layers == (near, LayerSpec(kv_heads=4, head_dim=24)) * 2
    shared = gemma4(num_kv_shared_layers=2).layers
    assert shared[2:] == (LayerSpec(20, source=0), LayerSpec(head_dim=32, source=1))
    assert gemma4(layer_types=None, num_hidden_layers=7).layers == (*[near] * 5, wide, wide)


def test_defaults_of_gemma3n():
    """The first ten layers of a deep model zero 95 % of their gates; every fifth layer has full attention."""
    deep = gemma3n(num_hidden_layers=12, layer_types=None, num_kv_shared_layers=1)
    assert deep.sparsity == (0.95,) * 10 + (0.0,) * 2
    assert [layer.window for layer in deep.layers] == [*[20] * 4, None] * 2 + [20] * 2
    assert deep.layers[-1].source == 10
    assert gemma3n().sparsity == (0.0,) * 4
    assert (gemma3n().final_softcap, gemma3n(final_logit_softcapping=None).final_softcap) == (30.0, None)
    assert gemma3n().hidden_sizes == (48,) * 4


def test_layers_that_read_others_keys_keep_none():
    """15 of 35 layers have a cache, three of them with full attention and 512-dim keys: bytes per token."""
    model = published("Gemma-4-E2B")
    cache = model.cache_spec
    assert (len(model.config.layers), len(cache.layers), cache.windows) == (35, 15, (512, None))
    assert cache.bytes_per_page(1, 2) == 2 * 2 * (12 * 256 + 3 * 512)
    assert [layer.source for layer in model.config.layers[15:20]] == [13, 13, 13, 13, 14]


def test_heads_of_unlike_layers_are_spread_where_all_can_be():
    cache = published("Gemma-4-26B-A4B").cache_spec
    assert {cache.sizes(layer) for layer in cache.layers} == {(8, 256), (2, 512)}
    assert kv_copies(cache, {"tensor": 2}) == 1
    with pytest.raises(EngineConfigError, match=r"tensor_parallel_size = 4 cannot be: .* 2 and 8 KV heads"):
        kv_copies(cache, {"tensor": 4})
    assert {cache.on_each(2).sizes(layer) for layer in cache.on_each(2).layers} == {(4, 256), (1, 512)}


def test_heads_that_read_inputs_of_layers_are_refused_where_these_are_streams():
    model = published("Gemma-3n-E4B")
    tapped = model.replace(module=model.module.clone(taps=(1,)))
    with pytest.raises(ValueError, match="a draft head that reads the layers' inputs is not supported"):
        jax.eval_shape(tapped.apply, model.params, jax.ShapeDtypeStruct((1, 4), "int32"))


def test_an_adapter_cannot_change_the_embeddings_of_each_layer():
    """There is no adapter bank for them either: it would be as large as the embeddings."""
    declared = published("Gemma-4-E2B").specs
    modules = known_modules(declared)
    assert "embed_tokens_per_layer" not in modules
    assert {"embed_tokens", "q_proj", "per_layer_input_gate", "per_layer_model_projection"} <= modules
