"""Mamba-2 models: accepted and rejected configs."""

import json
import math
import pathlib
from typing import Any

import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.registry import family_for

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "models"
CASES = {"granite": "granitemoehybrid-hub", "nemotron": "nemotron_h-hub", "falcon": "falcon_h1-hub"}


def config(family: str, **changes: Any) -> Any:
    fields = json.loads((GOLDENS / CASES[family] / "config.json").read_text()) | changes
    return family_for(fields).config(fields)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("granite", {"layer_types": None}, ["layer_types", "None", "4 of mamba"]),
        ("granite", {"layer_types": ["mamba"] * 3}, ["layer_types", "4 of mamba"]),
        ("granite", {"layer_types": [["mamba"]] * 4}, ["layer_types", "4 of mamba"]),
        ("granite", {"layer_types": ["mamba"] * 4}, ["layer_types", "must have attention"]),
        ("granite", {"num_experts_per_tok": 7}, ["num_experts_per_tok = 7", "num_local_experts (6)"]),
        ("granite", {"mamba_d_head": 8}, ["mamba_d_head = 8", "4 heads must be 64"]),
        ("granite", {"mamba_n_groups": 3}, ["mamba_n_groups = 3", "4 heads"]),
        ("granite", {"mamba_d_conv": 1}, ["mamba_d_conv = 1", "at least 2"]),
        ("granite", {"time_step_limit": [0.5]}, ["time_step_limit = [0.5]", "two numbers"]),
        ("granite", {"time_step_limit": [0.5, 0.1]}, ["time_step_limit = [0.5, 0.1]", "less than"]),
        ("granite", {"time_step_limit": "none"}, ["time_step_limit = 'none'", "two numbers"]),
        ("nemotron", {"hybrid_override_pattern": "MEM*X"}, ["hybrid_override_pattern = 'MEM*X'", "M * - E"]),
        ("nemotron", {"hybrid_override_pattern": "MEM"}, ["hybrid_override_pattern = 'MEM'", "must have attention"]),
        ("nemotron", {"hybrid_override_pattern": "M*" * 600}, ["hybrid_override_pattern", "1 to 1024"]),
        ("nemotron", {"layers_block_type": ["moe", "conv"]}, ["layers_block_type", "conv", "mamba"]),
        ("nemotron", {"tie_word_embeddings": True}, ["tie_word_embeddings = True"]),
        ("nemotron", {"attention_bias": True}, ["attention_bias = True"]),
        ("nemotron", {"n_groups": 3}, ["n_groups = 3", "4 heads"]),
        ("nemotron", {"mlp_hidden_act": "mish"}, ["mlp_hidden_act = 'mish'", "relu2"]),
        ("falcon", {"mlp_multipliers": [1.0]}, ["mlp_multipliers = [1.0]", "2 numbers"]),
        ("falcon", {"ssm_multipliers": "five"}, ["ssm_multipliers = 'five'", "5 numbers"]),
        ("falcon", {"mamba_d_ssm": 60}, ["mamba_d_head = 16", "must be 60"]),
    ],
)
def test_a_bad_field_is_named_with_its_value(family: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        config(family, **changes)
    assert [word for word in words if word not in str(refused.value)] == []


def test_infinite_time_steps_are_read_in_either_spelling() -> None:
    for infinite in (math.inf, {"__float__": "Infinity"}):
        assert config("granite", time_step_limit=[0.001, infinite]).mamba.limits == (0.001, math.inf)
    assert config("granite").mamba.limits == (0.0, math.inf)


def test_layers_have_what_they_need_and_nothing_else() -> None:
    layers = config("nemotron", hybrid_override_pattern="M*-E").layers
    assert [(layer.attends, len(layer.states)) for layer in layers] == [(False, 3), (True, 0), (False, 0), (False, 0)]
    assert all(layer.attends and len(layer.states) == 3 for layer in config("falcon").layers)


def test_a_model_without_experts_chooses_none() -> None:
    """IBM's files of dense models have these values."""
    dense = config("granite", num_local_experts=0, num_experts_per_tok=0)
    assert (dense.experts, set(dense.sparse)) == (0, {False})
