"""Log probabilities that an engine served are those of `Model.logprobs`, to the last bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.agreement import Sequences
from jaxinfer.check_on_policy import samples_of
from jaxinfer.engine.execution.on_policy import GivenTokens, ServedPrograms, applied_logprobs
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import RequestError, SamplingParams
from tests.fake_vision import vision_model
from tests.fakes import random_model

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 160,
    "num_pages": 100,
    "page_size": 16,
    "prefill_sizes": (16, 64),
}
PROMPTS = (1, 2, 16, 17, 18, 63, 64, 65, 66, 81, 120)
KINDS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.9, "n": 2}, {"top_p": 0.8})


def generate(llm: LLM, lengths: tuple[int, ...] = PROMPTS, more: int = 0) -> Sequences:
    """Generate greedily and at random; prompts end before, at and after borders of pages and chunks, and share a
    prefix."""
    rng, vocab = np.random.default_rng(0), llm.model.config.vocab_size - 8  # the last ones may be placeholders
    shared = rng.integers(0, vocab, max(lengths)).tolist()
    prompts = [[*shared[: length // 2], *rng.integers(0, vocab, length - length // 2).tolist()] for length in lengths]
    params = [
        SamplingParams(
            max_tokens=more + 3 + 5 * (number % 4), seed=number, logprobs=0, ignore_eos=True, **KINDS[number % 3]
        )
        for number in range(len(prompts))
    ]
    return Sequences.of(samples_of(llm.generate(prompts, params)))


def training_step(model: Model, like: Any, sequences: Sequences) -> tuple[Any, np.ndarray]:
    """Return the gradient of a loss, and the log probabilities that it was computed from."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        found = model.logprobs(params, jnp.asarray(sequences.tokens), like=like, **lengths_of(sequences))
        return jnp.sum(found**2), found

    gradient, found = jax.jit(jax.grad(loss, has_aux=True))(model.params)
    return gradient, np.asarray(found)


def lengths_of(sequences: Sequences) -> dict[str, np.ndarray]:
    return {"prompt_lengths": sequences.prompt_lengths, "lengths": sequences.lengths}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(random_model(), **SETTINGS)


@pytest.fixture(scope="module")
def sequences(llm: LLM) -> Sequences:
    return generate(llm)


def test_a_training_step_has_the_served_bits(llm, sequences):
    _, found = training_step(llm.model, llm, sequences)
    assert np.count_nonzero(sequences.served) > 100
    np.testing.assert_array_equal(found, sequences.served)


def test_the_gradient_is_that_of_apply(llm, sequences):
    model, lengths = llm.model, (sequences.prompt_lengths, sequences.lengths)

    def loss(params: Any) -> jax.Array:
        given = GivenTokens(jnp.asarray(sequences.tokens), *map(jnp.asarray, lengths))
        return jnp.sum(applied_logprobs(model, params, given) ** 2)

    expected, (found, _) = jax.jit(jax.grad(loss))(model.params), training_step(model, llm, sequences)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))


def test_applied_log_probabilities_are_those_of_the_logits(llm, sequences):
    given = GivenTokens(*map(jnp.asarray, (sequences.tokens, sequences.prompt_lengths, sequences.lengths)))
    logits = np.asarray(llm.model(given.tokens), np.float64)
    each = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(each[:, :-1], sequences.tokens[:, 1:, None], axis=2)[..., 0]
    found = applied_logprobs(llm.model, llm.model.params, given)
    np.testing.assert_allclose(found, np.where(sequences.served != 0, chosen, 0), atol=1e-5)


@pytest.mark.parametrize("changes", [{"prefill_sizes": (64,)}, {"decode_sizes": (64,)}])
def test_other_programs_have_other_bits(llm, sequences, changes):
    programs = llm.served_programs()
    other = dataclasses.replace(programs, engine=dataclasses.replace(programs.engine, **changes))
    if "prefill_sizes" in changes:
        other = dataclasses.replace(other, classes=((64, 0),))
    _, found = training_step(llm.model, other, sequences)
    assert 0 < np.abs(found - sequences.served).max() < 1e-4


def test_outside_of_jit_and_with_constant_tokens(llm, sequences):
    row, model = len(sequences.tokens) // 2, llm.model
    one = {name: getattr(sequences, name)[row : row + 1] for name in ("tokens", "prompt_lengths", "lengths", "served")}
    tokens, lengths = jnp.asarray(one["tokens"]), {name: one[name] for name in ("prompt_lengths", "lengths")}
    found = model.logprobs(model.params, tokens, like=llm, **lengths)
    constant = jax.jit(lambda: model.logprobs(model.params, tokens, like=llm, **lengths))()
    np.testing.assert_array_equal([found, constant], [one["served"]] * 2)


def test_without_lengths_all_tokens_but_the_first_are_generated(llm):
    sequences, model = generate(llm, (1,)), llm.model
    found = model.logprobs(model.params, jnp.asarray(sequences.tokens), like=llm)
    np.testing.assert_array_equal(found, sequences.served)


def test_programs_are_a_static_argument(llm):
    traced = 0

    def compute(model: Model, tokens: jax.Array, programs: ServedPrograms) -> jax.Array:
        nonlocal traced
        traced += 1
        return model.logprobs(model.params, tokens, like=programs)

    run = jax.jit(compute, static_argnums=2)
    programs, tokens = llm.served_programs(), jnp.ones((2, 8), jnp.int32)
    equal = dataclasses.replace(programs)
    np.testing.assert_array_equal(run(llm.model, tokens, programs), run(llm.model, tokens, equal))
    assert traced == 1


MODES: dict[str, dict[str, Any]] = {
    "recomputed": {"num_pages": 12, "swap_space_gib": 0},
    "swapped": {"num_pages": 12},
    "drafts": {"speculative": "ngram", "speculative_adaptive": False},
    "8-bit pool": {"kv_cache_dtype": "int8"},
    "adapters": {"enable_lora": True},
    "one row": {"max_num_seqs": 1},
}
SLOW = ("swapped", "adapters", "one row")


@pytest.mark.parametrize("mode", [pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in MODES])
def test_every_mode_has_the_served_bits(mode):
    llm = LLM(random_model(), **{**SETTINGS, **MODES[mode]})
    sequences = generate(llm, more=20 * ("num_pages" in MODES[mode]))
    preempted = sum(llm.engine.stats().preemptions.values())
    assert preempted > 0 or "num_pages" not in MODES[mode]
    np.testing.assert_array_equal(training_step(llm.model, llm, sequences)[1], sequences.served)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rows", "layout"), [("bfloat16", 1, "in first"), ("bfloat16", 4, "in last"), ("float32", 4, "in last")]
)
def test_weights_may_lie_otherwise_in_the_engine(dtype, rows, layout):
    model = random_model(dtype)
    copied = model.replace(params=jax.tree.map(jnp.copy, model.params))
    llm = LLM(copied.laid_out(layout), **{**SETTINGS, "max_num_seqs": rows})
    sequences = generate(llm, PROMPTS[::3])
    np.testing.assert_array_equal(training_step(model, llm, sequences)[1], sequences.served)


@pytest.mark.parametrize("kind", [{}, pytest.param({"axes": True, "deep": 1}, marks=pytest.mark.slow)])
def test_texts_have_the_served_bits_where_images_are_served(kind):
    llm = LLM(vision_model(**kind), **SETTINGS)
    sequences = generate(llm, PROMPTS[::2])
    np.testing.assert_array_equal(training_step(llm.model, llm, sequences)[1], sequences.served)
    assert "requests with images" in llm.served_programs().exceptions


def test_results_that_cannot_be_reproduced_are_refused():
    llm = LLM(random_model(), **SETTINGS, exactness="relaxed")
    with pytest.raises(RequestError, match="relaxed") as error:
        llm.model.logprobs(llm.model.params, jnp.ones((1, 4), jnp.int32), like=llm)
    assert error.value.field == "like"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": jnp.ones(4, jnp.int32)}, r"tokens.*\(4,\)"),
        ({"tokens": jnp.ones((1, 161), jnp.int32)}, "tokens.*160"),
        ({"params": {}}, "params.*missing"),
        ({"params": random_model("bfloat16").params}, "params.*bfloat16.*float32"),
        ({"model": random_model(num_hidden_layers=1)}, "like.*another model"),
    ],
)
def test_what_does_not_fit_is_named(llm, changes, words):
    given = {"model": llm.model, "params": llm.model.params, "tokens": jnp.ones((1, 4), jnp.int32), **changes}
    with pytest.raises(ValueError, match=words):
        given["model"].logprobs(given["params"], given["tokens"], like=llm)
