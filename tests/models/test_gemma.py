"""Gemma: config.json fields, rejected values, and the scale of embeddings."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.families.gemma import GemmaConfig
from jaxinfer.models.model import Model, abstract
from jaxinfer.models.registry import family_for
from jaxinfer.types import LayerSpec
from jaxinfer.weights import init_params
from tests.models.identity import check_identity

SIZES = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 20,
}


def config(model_type: str, **changes) -> GemmaConfig:
    return GemmaConfig.from_json({"model_type": model_type, **SIZES, **changes})


def model(architecture: str, model_type: str, dtype: str = "float32", **changes) -> Model:
    config_json = {"architectures": [architecture], "model_type": model_type, **SIZES, **changes}
    described = abstract(config_json, dtype)
    return described.replace(params=init_params(described.specs, 3, dtype))


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("gemma4", {}, ["model_type", "gemma4", "gemma3_text"]),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "True"]),
        ("gemma2", {"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ("gemma2", {"layer_types": ["full_attention"]}, ["layer_types", "4"]),
        ("gemma2", {"layer_types": ["chunked_attention"] * 4}, ["layer_types", "chunked_attention"]),
        ("gemma2", {"attn_logit_softcapping": 0}, ["attn_logit_softcapping", "0"]),
        ("gemma2", {"final_logit_softcapping": "high"}, ["final_logit_softcapping", "high"]),
        ("gemma2", {"query_pre_attn_scalar": -1}, ["query_pre_attn_scalar", "-1"]),
        ("gemma3_text", {"sliding_window_pattern": 0}, ["sliding_window_pattern", "0"]),
        ("gemma3_text", {"rope_scaling": "linear"}, ["rope_scaling", "linear"]),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, ["rope_parameters", "3"]),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear"}}, ["factor", "missing"]),
        ("gemma", {"hidden_act": "mish"}, ["hidden_act", "mish"]),
    ],
)
def test_a_bad_field_is_named_with_its_value(model_type, changes, words):
    with pytest.raises(ConfigError) as error:
        config(model_type, **changes)
    assert all(word in str(error.value) for word in words)


def test_images_are_refused():
    with pytest.raises(ConfigError, match="Gemma3ForConditionalGeneration"):
        family_for({"architectures": ["Gemma3ForConditionalGeneration"]})


def test_layers_of_each_generation():
    assert config("gemma").layers == (LayerSpec(),) * 4
    assert config("gemma2").layers == (LayerSpec(20, 50.0), LayerSpec(None, 50.0)) * 2
    assert config("gemma2", attn_logit_softcapping=None).layers[0] == LayerSpec(20)
    assert config("gemma3_text", num_hidden_layers=7).local == (True,) * 5 + (False, True)
    assert config("gemma3_text", sliding_window_pattern=2).local == (True, False) * 2
    kinds = ["full_attention", "sliding_attention"] * 2
    assert config("gemma3_text", layer_types=kinds).local == (False, True) * 2


def test_defaults_of_each_generation():
    assert config("gemma").scale == 16**-0.5
    assert config("gemma2").scale == config("gemma3_text").scale == 256**-0.5
    assert [config(kind).final_softcap for kind in ("gemma", "gemma2", "gemma3_text")] == [None, 30.0, None]
    assert config("gemma2", final_logit_softcapping=None).final_softcap is None
    assert config("gemma", hidden_act="gelu").activation == "gelu_pytorch_tanh"
    assert config("gemma2").tied
    assert not config("gemma2", tie_word_embeddings=False).tied


def test_ropes_of_gemma3():
    """Scaling applies to full-attention layers; sliding-window layers have their own base."""
    both = config("gemma3_text")
    assert (both.rope.theta, both.local_rope.theta) == (1e6, 1e4)
    scaled = config("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_local_base_freq=5e3)
    assert (scaled.rope.kind, scaled.rope.factor, scaled.local_rope.kind) == ("linear", 8.0, "default")
    assert (scaled.rope.theta, scaled.local_rope.theta) == (1e6, 5e3)
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 7e5}, "sliding_attention": None}
    new = config("gemma3_text", rope_parameters=nested)
    assert (new.rope.theta, new.local_rope.theta) == (7e5, 1e4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_are_scaled_in_their_own_dtype(dtype):
    gemma = model("Gemma2ForCausalLM", "gemma2", dtype)
    tokens = jnp.arange(5)
    embedded = gemma.module.apply({"params": gemma.params}, tokens, tokens, method="embed")
    factor = np.asarray(jnp.asarray(40**0.5, dtype))  # 6.3246, as bfloat16 6.3125
    expected = (gemma.params["embed"]["table"][:5] * factor).astype(dtype)
    np.testing.assert_array_equal(np.asarray(embedded), np.asarray(expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "model_type"), [("Gemma2ForCausalLM", "gemma2"), ("Gemma3ForCausalLM", "gemma3_text")]
)
def test_requests_have_the_same_bits_in_any_company(architecture, model_type):
    check_identity(model(architecture, model_type, num_hidden_layers=2, sliding_window_pattern=2))
