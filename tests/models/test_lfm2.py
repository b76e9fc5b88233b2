"""Config validation of LFM2."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.families.lfm2 import Lfm2Config

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
}


@pytest.mark.parametrize(
    ("changes", "hidden"),
    [
        ({}, 8192),
        ({"block_ff_dim": 6912}, 4608),
        ({"intermediate_size": 100, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.5}, 128),
        ({"intermediate_size": 100, "block_ffn_dim_multiplier": None}, 66),
        ({"intermediate_size": 100, "block_auto_adjust_ff_dim": False}, 100),
    ],
)
def test_hidden_sizes_are_cut_as_the_file_says(changes: dict[str, Any], hidden: int):
    assert Lfm2Config.from_dense(SIZES | changes).intermediate_size == hidden


def test_layers_that_attend_are_named_or_numbered():
    numbered = {"layer_types": None, "full_attn_idxs": [1]}
    named, listed, whole = (Lfm2Config.from_dense(SIZES | each) for each in ({}, numbered, {"layer_types": None}))
    assert named.layers == listed.layers
    assert [layer.attends for layer in named.layers] == [False, True, False]
    assert all(layer.attends for layer in whole.layers)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["conv", "sliding_attention", "conv"]}, ["layer_types", "sliding_attention"]),
        ({"layer_types": ["conv"]}, ["layer_types", "must be 3"]),
        ({"layer_types": None, "full_attn_idxs": ["1"]}, ["full_attn_idxs", "'1'"]),
        ({"conv_L_cache": 1}, ["conv_L_cache", "1"]),
        ({"conv_bias": 1}, ["conv_bias", "1"]),
        ({"block_ff_dim": 0}, ["block_ff_dim", "0"]),
        ({"block_ff_dim": 8, "block_ffn_dim_multiplier": -1.0}, ["block_ffn_dim_multiplier", "-1.0"]),
        ({"block_ff_dim": 8, "block_ffn_dim_multiplier": 0.0}, ["block_ff_dim", "8", "block_ffn_dim_multiplier"]),
    ],
)
def test_impossible_fields_are_refused_by_name(changes: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as error:
        Lfm2Config.from_dense(SIZES | changes)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 40}, ["num_experts_per_tok", "40", "32"]),
        ({"layer_types": None}, ["layer_types", "None"]),
        ({"num_dense_layers": -1}, ["num_dense_layers", "-1"]),
    ],
)
def test_impossible_experts_are_refused_by_name(changes: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as error:
        Lfm2Config.from_moe(SIZES | changes)
    assert [word for word in words if word not in str(error.value)] == []
