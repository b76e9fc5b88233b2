"""Models with recurrent states: the same bits alone and in every mode, and the logprobs of `model.apply`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfigError
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model, abstract
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.weights import init_params
from tests.engine.test_identity import MODES, ROOMY, SETTINGS, Requests, alone, check_mode, make_requests, run

SLOW = ("small budget", "synchronous", "priority", "fair", "static", "no prefix cache")
SERVED = [mode for mode, (changes, _) in MODES.items() if "speculative" not in changes and mode != "swapped"]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "max_position_embeddings": 512,
}


def hybrid(**changes: Any) -> Model:
    model = abstract(CONFIG | changes, "float32", "hybrid")
    params = init_params(model.specs, 0, "float32")
    return model.replace(params=jax.tree.map(lambda x: x * 6.0 if x.ndim > 1 else x, params))


@pytest.fixture(scope="module")
def served() -> tuple[Model, Requests, list[Any]]:
    model = hybrid()
    requests = make_requests(40, model.config.vocab_size)
    return model, requests, alone(model, requests, **SETTINGS)


@pytest.mark.parametrize("mode", [pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in SERVED])
def test_every_mode_gives_the_bits_of_each_request_alone(served, mode):
    model, requests, expected = served
    changes, happened = MODES[mode]
    check_mode(LLM(model, **{**SETTINGS, "num_pages": ROOMY, **changes}), requests, expected, happened)


def test_few_states_cost_time_and_no_bit(served):
    model, requests, expected = served
    llm = LLM(model, **SETTINGS, num_pages=ROOMY, num_states=7)
    check_mode(llm, requests, expected, lambda stats: stats.preemptions["recompute"] > 0)


def test_beginnings_are_found_where_a_state_was_kept(served):
    model, requests, _ = served
    llm = LLM(model, **SETTINGS, num_pages=ROOMY, num_states=128)
    run(llm, requests)
    cold = llm.engine.stats().prefix_hits
    run(llm, requests)
    warm = llm.engine.stats().prefix_hits - cold
    if llm.engine.calibration.exact_resume:
        assert 0 < 1.5 * cold < warm
    else:  # on this processor resuming a prompt from a kept state changes bits
        assert cold == warm == 0


def test_served_logprobs_are_those_of_the_plain_function(served):
    model, _, _ = served
    prompts = [np.random.default_rng(length).integers(0, 97, length).tolist() for length in (1, 17, 64, 65, 100)]
    outputs = LLM(model, **SETTINGS).generate(prompts, SamplingParams(temperature=0.0, max_tokens=40, logprobs=1))
    for prompt, output in zip(prompts, outputs, strict=True):
        sample = output.outputs[0]
        expected = jax.nn.log_softmax(model.apply(model.params, jnp.array([prompt + sample.token_ids]))[0])
        for step, (token, logprobs) in enumerate(zip(sample.token_ids, sample.logprobs or [], strict=True)):
            assert abs(logprobs[token].logprob - expected[len(prompt) + step - 1, token]) < 2e-5


def test_gradients_go_through_the_states(served):
    model, _, _ = served
    tokens = jnp.arange(70)[None] % 97

    def loss(params: Any) -> jax.Array:
        return model.apply(params, tokens).var()

    gradients = jax.grad(loss)(model.params)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradients))
    assert float(jnp.abs(gradients["layers_0"]["attention"]["log_decay"]).max()) > 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_states": 3}, "num_states = 3 must be at least 4"),
        ({"multi_step": 32, "page_size": 16}, "multi_step = 32 must be at most page_size"),
    ],
)
def test_what_cannot_be_is_refused(settings, named):
    with pytest.raises(EngineConfigError, match=named):
        LLM(hybrid(), **SETTINGS | settings)


def test_states_are_of_models_that_have_some():
    plain = hybrid(layer_types=["full_attention"] * 4)
    with pytest.raises(EngineConfigError, match="num_states = 8 is of models with states"):
        LLM(plain, **SETTINGS, num_states=8)
