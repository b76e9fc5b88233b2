"""Log probabilities that an engine served are those of `Model.logprobs`, to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.agreement import Sequences
from jaxinfer.check_on_policy import samples_of
from jaxinfer.engine.execution.on_policy import GivenTokens, ServedPrograms, applied_logprobs
from jaxinfer.llm import LLM
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.merge import declared
from jaxinfer.lora.trainable import init_adapter
from jaxinfer.models.model import Model
from jaxinfer.quant.banks import ALL_LINEAR
from jaxinfer.sampling_params import RequestError, SamplingParams
from tests.fake_vision import vision_model
from tests.fakes import medium_model, random_model
from tests.lora.drawn import drawn
from tests.lora.goldens import GOLDENS, golden, load_base, read

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 160,
    "num_pages": 100,
    "page_size": 16,
    "prefill_sizes": (16, 64),
}
PROMPTS = (1, 2, 16, 17, 18, 63, 64, 65, 66, 81, 120)
RANKS = {"pirate": 3, "poet": 8}
MODULES = (ALL_LINEAR, "embed_tokens", "lm_head")
LORAS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "lora_target_modules": MODULES}
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


def generate_mixed(llm: LLM, adapters: Mapping[str, Adapter]) -> dict[str | None, Sequences]:
    """Generate with each adapter and with none, in one batch; return the sequences of each."""
    rng, vocab = np.random.default_rng(0), llm.model.config.vocab_size - 8
    for name, adapter in adapters.items():
        llm.load_lora(name, adapter)
    names = [name for _ in PROMPTS for name in (*adapters, None)]
    prompts = [rng.integers(0, vocab, PROMPTS[number % len(PROMPTS)]).tolist() for number in range(len(names))]
    params = [
        SamplingParams(max_tokens=3 + number % 9, seed=number, logprobs=0, ignore_eos=True, **KINDS[number // 3 % 3])
        for number in range(len(names))
    ]
    outputs = llm.generate(prompts, params, lora=names)
    return {
        name: Sequences.of(samples_of(each for each, of in zip(outputs, names, strict=True) if of == name))
        for name in (*adapters, None)
    }


def training_step(model: Model, like: Any, sequences: Sequences, lora: Adapter | None = None) -> tuple[Any, np.ndarray]:
    """Return the gradient of a loss by parameters and adapter, and the log probabilities that it was computed from."""

    def loss(params: Any, lora: Adapter | None) -> tuple[jax.Array, jax.Array]:
        given = {**lengths_of(sequences), "lora": lora}
        found = model.logprobs(params, jnp.asarray(sequences.tokens), like=like, **given)
        return jnp.sum(found**2), found

    gradient, found = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(model.params, lora)
    return gradient, np.asarray(found)


def applied_gradient(model: Model, sequences: Sequences, lora: Adapter | None = None) -> Any:
    """Return the gradient of the same loss of `Model.apply`."""
    given = GivenTokens(*map(jnp.asarray, (sequences.tokens, sequences.prompt_lengths, sequences.lengths)))

    def loss(params: Any, lora: Adapter | None) -> jax.Array:
        return jnp.sum(applied_logprobs(model, params, given, lora) ** 2)

    return jax.jit(jax.grad(loss, (0, 1)))(model.params, lora)


def require_close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))


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
    require_close(training_step(llm.model, llm, sequences)[0], applied_gradient(llm.model, sequences))


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
    "one row": {"max_num_seqs": 1},
}
SLOW = ("swapped", "one row")


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


@pytest.fixture(scope="module")
def adapted() -> LLM:
    return LLM(random_model(), **SETTINGS, **LORAS)


def adapters_of(model: Model, modules: Sequence[str] = MODULES) -> dict[str, Adapter]:
    return {name: drawn(declared(model), name, rank, modules) for name, rank in RANKS.items()}


@pytest.fixture(scope="module")
def mixed(adapted: LLM) -> dict[str | None, Sequences]:
    return generate_mixed(adapted, adapters_of(adapted.model))


@pytest.mark.parametrize("name", ["pirate", *(pytest.param(name, marks=pytest.mark.slow) for name in (None, "poet"))])
def test_requests_with_adapters_have_the_served_bits_and_the_gradient_of_apply(adapted, mixed, name):
    model, sequences = adapted.model, mixed[name]
    lora = None if name is None else adapters_of(model)[name]
    gradient, found = training_step(model, adapted, sequences, lora)
    assert np.count_nonzero(sequences.served) > 50
    np.testing.assert_array_equal(found, sequences.served)
    require_close(gradient, applied_gradient(model, sequences, lora))
    if name is not None:
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient[1]))


def test_without_their_adapter_they_have_others(adapted, mixed):
    _, found = training_step(adapted.model, adapted, mixed["pirate"])
    assert np.abs(found - mixed["pirate"].served).max() > 0.01


def test_an_adapter_that_a_step_has_changed_is_served_under_its_name(adapted):
    """The loop of a trainer: one program for all steps, and rollouts with the arrays that it made."""
    model, programs, traced = adapted.model, adapted.served_programs(), 0
    adapter = jax.tree.map(jnp.asarray, init_adapter(model, 2, jax.random.key(0)))

    def loss(adapter: Adapter, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        nonlocal traced
        traced += 1
        found = model.logprobs(model.params, tokens, like=programs, prompt_lengths=jnp.full(2, 9), lora=adapter)
        return found.mean(), found

    step, params = jax.jit(jax.grad(loss, has_aux=True)), SamplingParams(max_tokens=6, logprobs=0, ignore_eos=True)
    for _ in range(3):
        adapted.load_lora("trained", adapter)
        sequences = Sequences.of(
            samples_of(adapted.generate([list(range(9)), list(range(5, 14))], params, lora="trained"))
        )
        gradient, found = step(adapter, jnp.asarray(sequences.tokens))
        np.testing.assert_array_equal(found, sequences.served)
        adapter = jax.tree.map(lambda x, change: x + 0.1 * change, adapter, gradient)
    assert traced == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral-experts", {}),
        ("llama-int8-dora", {}),
        ("llama-nf4-all", {}),
        ("gpt2-dora", {}),
        ("gemma-dora-rslora", {"kv_cache_dtype": "int8"}),
        ("falcon-all", {"max_num_seqs": 1}),
        ("llama-tied-head", {"speculative": "ngram", "speculative_adaptive": False}),
        ("llama-tied-embeddings", {"multi_step": 4}),
    ],
)
def test_adapters_of_peft_have_the_served_bits(name, settings, tmp_path):
    base = load_base(golden(name), tmp_path)
    adapters = {name: read(GOLDENS / name, base)}
    llm = LLM(base, **{**SETTINGS, **LORAS, "max_model_len": 128, **settings})
    for each, sequences in generate_mixed(llm, adapters).items():
        found = llm.model.logprobs(
            base.params, jnp.asarray(sequences.tokens), like=llm, **lengths_of(sequences), lora=adapters.get(each)
        )
        np.testing.assert_array_equal(found, sequences.served)


@pytest.mark.slow
def test_adapters_where_bits_depend_on_the_number_of_rows():
    model = medium_model("bfloat16", layers=2)
    llm, adapters = LLM(model, **{**SETTINGS, **LORAS}), adapters_of(model)
    for name, sequences in generate_mixed(llm, adapters).items():
        np.testing.assert_array_equal(training_step(model, llm, sequences, adapters.get(name))[1], sequences.served)


PATH = ("layers_0", "attention", "out")


def changed(adapter: Adapter, **arrays: Any) -> Adapter:
    return dataclasses.replace(adapter, deltas={PATH: dataclasses.replace(adapter.deltas[PATH], **arrays)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: Adapter("", 1, {("layers_9", "up"): it.deltas[PATH]}), r"lora.*layers_9\.up"),
        (lambda it: changed(it, a=jnp.ones((9, 32)), b=jnp.ones((32, 9))), "lora.*out.*rank 9.*max_lora_rank.*8"),
        (lambda it: changed(it, a=jnp.ones((2, 31))), r"lora.*out.*\(2, 31\)"),
        (lambda it: changed(it, a=jnp.ones(32)), r"lora.*out.*\(32,\)"),
        (lambda it: changed(it, b=jnp.ones((32, 4))), r"lora.*out.*\(32, 4\)"),
        (lambda it: changed(it, a=jnp.ones((2, 32), jnp.int32)), "lora.*out.*int32"),
    ],
)
def test_an_adapter_that_could_not_be_served_is_named(adapted, change, words):
    lora = change(init_adapter(adapted.model, 2, jax.random.key(0)))
    with pytest.raises(RequestError, match=words) as error:
        adapted.model.logprobs(adapted.model.params, jnp.ones((1, 4), jnp.int32), like=adapted, lora=lora)
    assert error.value.field == "lora"


def test_an_engine_without_adapters_has_none_of_a_trainer(llm):
    lora = init_adapter(llm.model, 2, jax.random.key(0))
    with pytest.raises(RequestError, match="enable_lora") as error:
        llm.model.logprobs(llm.model.params, jnp.ones((1, 4), jnp.int32), like=llm, lora=lora)
    assert error.value.field == "lora"


def test_modules_without_banks_are_named_with_the_setting(adapted):
    programs, lora = adapted.served_programs(), init_adapter(adapted.model, 2, jax.random.key(0), names=["down"])
    fewer = dataclasses.replace(programs, engine=dataclasses.replace(programs.engine, lora_target_modules=("q_proj",)))
    with pytest.raises(RequestError, match=r"down.*lora_target_modules.*down_proj"):
        adapted.model.logprobs(adapted.model.params, jnp.ones((1, 4), jnp.int32), like=fewer, lora=lora)
