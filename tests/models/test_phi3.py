"""Phi-3: config.json fields, rejected values, and the choice of long factors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.llm import LLM
from jaxinfer.models.config import ConfigError
from jaxinfer.models.families.llama import LlamaConfig
from jaxinfer.models.families.phi3 import config_from_json
from jaxinfer.models.model import Model, abstract
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.weights import init_params
from tests.models.identity import SETTINGS, check_identity

SIZES = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FACTORS = {"short_factor": [1.0] * 4 + [1.5] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0, 12.0, 20.0, 30.0, 40.0]}
LONGROPE = {"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 64}


def config(**changes) -> LlamaConfig:
    return config_from_json({**SIZES, **changes})


def model(**changes) -> Model:
    described = abstract({**SIZES, **changes}, "float32")
    params = init_params(described.specs, 3)
    return described.replace(params=jax.tree.map(lambda x: x * 4.0 if x.ndim > 1 else x, params))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "linear", "Phi-3"]),
        (
            {"rope_scaling": {"type": "longrope", **FACTORS, "long_factor": [1.0]}},
            ["long_factor", "[1.0]", "8 numbers"],
        ),
        ({"rope_scaling": {"type": "su"}}, ["short_factor", "numbers"]),
        ({"partial_rotary_factor": 0}, ["partial_rotary_factor", "0"]),
        ({"sliding_window": -5}, ["sliding_window", "-5"]),
        ({"hidden_act": "mish"}, ["hidden_act", "mish"]),
    ],
)
def test_a_bad_field_is_named_with_its_value(changes, words):
    with pytest.raises(ConfigError) as error:
        config(**changes)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_longrope_has_gone_by_other_names(name):
    rope = config(rope_scaling={"type": name, **FACTORS}, original_max_position_embeddings=64).rope
    assert rope == config(**LONGROPE).rope
    assert (rope.kind, rope.original_max_position, rope.factor) == ("longrope", 64, 4.0)


def test_a_window_that_no_text_outgrows_is_none():
    assert config(sliding_window=255).layers[0].window == 255
    assert config(sliding_window=256).layers[0].window is None
    assert config().layers[0].window is None


def prompt_logprobs(phi: Model, length: int) -> list[dict]:
    """Return the logprobs of a short prompt with ``max_model_len`` of ``length``."""
    llm = LLM(phi, **{**SETTINGS, "max_model_len": length, "max_num_seqs": 2})
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0)
    return llm.generate([list(range(20))], params)[0].prompt_logprobs


@pytest.mark.slow
def test_an_engine_takes_one_set_of_factors_for_all_its_texts():
    phi = model(**LONGROPE)
    tokens = jnp.arange(20)
    for length, long in ((64, False), (65, True)):
        served = prompt_logprobs(phi, length)
        fixed = phi.module.clone(config=dataclasses.replace(phi.config, rope=phi.config.rope.up_to(length)))
        logits = phi.replace(module=fixed).apply(phi.params, tokens)
        expected = jax.nn.log_softmax(logits)[np.arange(19), tokens[1:]]
        got = [position[token].logprob for token, position in enumerate(served) if position]
        np.testing.assert_allclose(got, expected, atol=1e-4)
        other = jax.nn.log_softmax(phi.apply(phi.params, tokens))[np.arange(19), tokens[1:]]
        assert (np.abs(np.asarray(expected - other)).max() > 1e-3) == long


@pytest.mark.slow
def test_requests_have_the_same_bits_in_any_company():
    check_identity(model(**LONGROPE, sliding_window=40))
