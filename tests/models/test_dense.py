"""Dense families besides Llama: config.json fields and rejected values."""

from __future__ import annotations

import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.registry import FAMILIES

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


def config(architecture: str, **changes):
    return FAMILIES[architecture].config({**SIZES, **changes})


def windows(architecture: str, **changes) -> list[int | None]:
    return [layer.window for layer in config(architecture, **changes).layers]


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Olmo2ForCausalLM", {"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ("Olmo3ForCausalLM", {"sliding_window": None}, ["sliding_window", "None"]),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"]}, ["layer_types", "4"]),
        ("Olmo3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, ["rope_parameters", "full_attention"]),
        ("GraniteForCausalLM", {"logits_scaling": 0}, ["logits_scaling", "0"]),
        ("GraniteForCausalLM", {"attention_multiplier": "x"}, ["attention_multiplier", "'x'"]),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "[1, 0]"]),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, ["no_rope_layer_interval", "0"]),
        ("SmolLM3ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, ["layer_types", "use_sliding_window"]),
        ("CohereForCausalLM", {"logit_scale": "x"}, ["logit_scale", "'x'"]),
        ("CohereForCausalLM", {"layer_norm_eps": "x"}, ["layer_norm_eps", "'x'"]),
        ("Cohere2ForCausalLM", {"sliding_window_pattern": 0}, ["sliding_window_pattern", "0"]),
        ("Cohere2ForCausalLM", {"sliding_window": None}, ["sliding_window", "None"]),
        ("GlmForCausalLM", {"model_type": "chatglm"}, ["model_type", "'chatglm'"]),
        ("GlmForCausalLM", {"partial_rotary_factor": 0.01}, ["partial_rotary_factor", "0.01"]),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG"}, ["sliding_window_pattern", "'LLLG'"]),
        ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, ["sliding_window"]),
        ("Ernie4_5ForCausalLM", {"use_bias": "yes"}, ["use_bias", "'yes'"]),
        ("HunYuanDenseV1ForCausalLM", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, ["alpha", "-1.0"]),
        ("GPTNeoXForCausalLM", {"rotary_pct": 0.01}, ["partial_rotary_factor", "0.01"]),
        ("GPTNeoXForCausalLM", {"hidden_size": 66}, ["hidden_size", "66"]),
        ("Starcoder2ForCausalLM", {"sliding_window": -5}, ["sliding_window", "-5"]),
        ("StableLmForCausalLM", {"qk_layernorm": 1}, ["qk_layernorm", "1"]),
        ("InternLM3ForCausalLM", {"qkv_bias": True, "bias": False}, ["qkv_bias = True", "as bias is"]),
        ("InternLM3ForCausalLM", {"attention_bias": True}, ["attention_bias = True", "as mlp_bias is"]),
        ("ArceeForCausalLM", {"hidden_act": "xielu"}, ["hidden_act", "'xielu'"]),
        ("ApertusForCausalLM", {"hidden_act": "silu"}, ["hidden_act = 'silu'", "xielu"]),
        ("ApertusForCausalLM", {"qk_norm": False}, ["qk_norm = False"]),
        ("ApertusForCausalLM", {"post_norm": True}, ["post_norm = True"]),
        ("ApertusForCausalLM", {"mlp_bias": True}, ["mlp_bias = True"]),
        ("NemotronForCausalLM", {"partial_rotary_factor": 0.01}, ["partial_rotary_factor = 0.01", "rotates 0 of 16"]),
        ("NemotronForCausalLM", {"norm_eps": "x"}, ["norm_eps = 'x'"]),
    ],
)
def test_a_bad_field_is_named_with_its_value(architecture, changes, words):
    with pytest.raises(ConfigError) as error:
        config(architecture, **changes)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("architecture", ["Olmo3ForCausalLM", "Cohere2ForCausalLM", "Exaone4ForCausalLM"])
def test_every_fourth_layer_sees_everything(architecture):
    assert windows(architecture) == [4096, 4096, 4096, None]


def test_layers_without_a_window_do_not_know_positions():
    assert config("Cohere2ForCausalLM").rotated == (True, True, True, False)
    assert config("Exaone4ForCausalLM").rotated == (True, True, True, False)
    assert config("Exaone4ForCausalLM", sliding_window=None).rotated == (True,) * 4


def test_smollm3_has_windows_where_it_has_no_positions():
    assert config("SmolLM3ForCausalLM").rotated == (True, True, True, False)
    assert windows("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=8) == [None, None, None, 8]
    assert config("SmolLM3ForCausalLM", num_key_value_heads=None).kv_heads == 4


def test_olmo3_stretches_what_sees_everything_alone():
    read = config("Olmo3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (read.rope.kind, read.local_rope.kind) == ("linear", "default")
    assert read.rope.theta == read.local_rope.theta == 5e5


def test_an_alpha_of_hunyuan_is_a_larger_theta():
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    rope = config("HunYuanDenseV1ForCausalLM", head_dim=128, rope_theta=1e4, rope_scaling=scaling).rope
    assert (rope.kind, rope.theta) == ("default", pytest.approx(1e4 * 1000.0 ** (128 / 126)))
