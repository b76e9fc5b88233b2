"""Routing of experts that is read from one forward pass and replayed in another."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.layers.moe import layers_of_experts
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import RequestError, SamplingParams
from tests.fakes import random_model
from tests.models.parity import load_case
from tests.models.test_families import ROWS
from tests.models.test_parity import golden

# One for each way to score experts, and the families with a layer of experts of their own.
CASES = {**ROWS, "gemma4_text": "gemma4_text-experts"}
SLOW = ("gpt_oss", "deepseek_v3", "gemma4_text", "nemotron_h", "llama4_text", "phimoe")
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 60, (2, 9)))


@functools.cache
def model_of(kind: str, folder: pathlib.Path) -> Model:
    return load_case(golden(CASES[kind]), folder)


@pytest.fixture(params=["mixtral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of(request.param, tmp_path_factory.getbasetemp() / request.param)


def test_the_own_routing_replayed_has_the_same_bits(model: Model) -> None:
    routed = model.routed_experts(model.params, TOKENS)
    layers = layers_of_experts(model.params)
    assert routed.shape[:3] == (2, 9, layers)
    assert jnp.issubdtype(routed.dtype, jnp.integer)
    want = model.apply(model.params, TOKENS)
    assert np.array_equal(model.apply(model.params, TOKENS, routed_experts=routed), want)
    free = jnp.full_like(routed, -1)
    assert np.array_equal(model.apply(model.params, TOKENS, routed_experts=free), want)


def test_another_routing_is_taken(model: Model) -> None:
    routed = np.array(model.routed_experts(model.params, TOKENS))
    other = routed.copy()
    taken = routed[0, 3, -1]
    other[0, 3, -1, 0] = next(expert for expert in range(int(routed.max()) + 1) if expert not in taken)
    before = np.asarray(model.apply(model.params, TOKENS))
    after = np.asarray(model.apply(model.params, TOKENS, routed_experts=jnp.asarray(other)))
    assert np.array_equal(after[1], before[1])
    assert np.array_equal(after[0, :3], before[0, :3])
    assert not np.array_equal(after[0, 3], before[0, 3])


def test_the_routing_of_other_weights_is_replayed(model: Model) -> None:
    """The case it is for: a trainer whose weights have moved takes the experts that the sampler took."""
    noise = jax.random.split(jax.random.key(0), len(jax.tree.leaves(model.params)))
    leaves, tree = jax.tree.flatten(model.params)
    moved = tree.unflatten(
        [x + 0.3 * x.std() * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, noise, strict=True)]
    )
    theirs, own = model.routed_experts(moved, TOKENS), model.routed_experts(model.params, TOKENS)
    assert not np.array_equal(theirs, own)

    @jax.jit
    def replay(params, routed):
        return model.apply(params, TOKENS, routed_experts=routed).sum()

    grads = jax.grad(replay)(model.params, theirs)
    assert jax.tree.structure(grads) == jax.tree.structure(model.params)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))
    assert replay(model.params, theirs) != replay(model.params, own)


def test_what_is_not_of_the_tokens_or_the_model_is_rejected(model: Model) -> None:
    routed = model.routed_experts(model.params, TOKENS)
    for wrong in (routed[:, :-1], routed[:, :, :-1], routed[0]):
        with pytest.raises(ValueError, match="routed_experts of shape"):
            model.apply(model.params, TOKENS, routed_experts=wrong)
    dense = random_model()
    with pytest.raises(ValueError, match="has no experts"):
        dense.routed_experts(dense.params, TOKENS)
    with pytest.raises(ValueError, match="routed_experts of shape"):
        dense.apply(dense.params, TOKENS, routed_experts=routed)


def test_served_tokens_return_the_experts_of_their_forward_pass(model: Model) -> None:
    settings = {"max_num_seqs": 4, "max_model_len": 64, "page_size": 16, "prefill_sizes": (32,)}
    llm = LLM(model, enable_training_outputs=True, **settings)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [7]]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=9, return_routed_experts=True)
    outputs = [whole.outputs[0] for whole in llm.generate(prompts, params)]
    for prompt, output in zip(prompts, outputs, strict=True):
        routed = output.arrays.routed_experts
        tokens = jnp.asarray([*prompt, *output.token_ids])
        want = np.asarray(model.routed_experts(model.params, tokens))
        at = slice(len(prompt) - 1, len(tokens) - 1)
        assert routed.shape == want[at].shape
        assert (routed == want[at]).mean() > 0.98  # `apply` may round a score in a tie otherwise
        given = np.full_like(want, -1)
        given[at] = routed
        logits = model.apply(model.params, tokens, routed_experts=jnp.asarray(given))
        logprobs = np.asarray(jax.nn.log_softmax(logits))[np.arange(at.start, at.stop), output.token_ids]
        np.testing.assert_allclose(logprobs, output.arrays.logprobs, atol=1e-4)


def test_prompts_return_their_experts_too(model: Model) -> None:
    """With those of the output they are the routing of the whole text, whatever was cached, and however it ran."""
    settings = {"max_num_seqs": 3, "max_model_len": 64, "page_size": 16, "prefill_sizes": (16,), "num_pages": 6}
    llm = LLM(model, enable_training_outputs=True, **settings)
    prompts = [np.random.default_rng(size).integers(1, 60, size).tolist() for size in (37, 1, 20)]
    params = SamplingParams(
        temperature=0.8, seed=1, max_tokens=9, return_routed_experts=True, prompt_logprobs=0, ignore_eos=True
    )
    with count_compilations() as seen:
        plain = llm.generate(prompts[0], SamplingParams(max_tokens=1))
        outputs = llm.generate(prompts, params)
        (again,) = llm.generate(prompts[0], params)
    assert seen.count == 0
    assert plain[0].prompt_routed_experts is None
    for whole in outputs:
        prompt, output = whole.prompt_token_ids, whole.outputs[0]
        tokens = jnp.asarray([*prompt, *output.token_ids][:-1])
        want = np.asarray(model.routed_experts(model.params, tokens))
        own, first = output.arrays.routed_experts, whole.prompt_routed_experts
        assert (first is None) == (len(prompt) == 1)
        routed = own if first is None else np.concatenate([first, own])
        assert routed.shape == want.shape
        assert (routed == want).mean() > 0.98  # `apply` may round a score in a tie otherwise
        logits = model.apply(model.params, tokens, routed_experts=jnp.asarray(routed))
        at = np.arange(len(prompt) - 1, len(tokens))
        logprobs = np.asarray(jax.nn.log_softmax(logits))[at, output.token_ids]
        np.testing.assert_allclose(logprobs, output.arrays.logprobs, atol=1e-4)
    assert np.array_equal(again.prompt_routed_experts, outputs[0].prompt_routed_experts)


def test_models_without_experts_reject_it() -> None:
    llm = LLM(random_model(), max_num_seqs=2, max_model_len=64, enable_training_outputs=True)
    with pytest.raises(RequestError) as caught:
        llm.generate([[1]], SamplingParams(return_routed_experts=True))
    assert caught.value.field == "return_routed_experts"
