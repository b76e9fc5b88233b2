"""A draft model next to the target model: its cache, rejected settings, its cost. Bitwise identity: test_identity."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jaxinfer.config import EngineConfig, EngineConfigError, check
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.llm import LLM
from jaxinfer.loading import with_draft
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import LayerSpec
from tests.fakes import random_model
from tests.sampling.reference import p_value

DRAFTS = 4
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_model_len": 160,
    "page_size": 16,
    "prefill_sizes": (16, 64),
    "num_pages": 60,
    "speculative": "draft_model",
    "num_speculative_tokens": DRAFTS,
    "speculative_adaptive": False,
}
PROMPTS = [[(7 * number + place * place) % 97 for place in range(5 + 20 * number)] for number in range(4)]


@pytest.fixture(scope="module")
def itself() -> Model:
    """Return a model that drafts for itself: a missing or wrong entry in the draft cache gives a rejected draft."""
    model = random_model()
    return model.replace(draft=model)


def right(stats: EngineStats) -> float:
    """Return the share of accepted draft tokens."""
    return stats.draft_accepted / stats.draft_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_drafts_for_itself_is_right(itself: Model, temperature: float) -> None:
    llm = LLM(itself, **SETTINGS)
    params = SamplingParams(temperature=temperature, max_tokens=41, seed=3, ignore_eos=True)
    llm.generate(PROMPTS[:1], params)
    stats = llm.engine.stats()
    # The first token after the prompt is a row alone; then each step gives five tokens, four of them drafts.
    assert (stats.draft_tokens, stats.draft_accepted) == (32, 32)


@pytest.mark.parametrize("changes", [{}, {"swap": 1, "num_pages": 11}, {"swap_space_gib": 0, "num_pages": 11}])
def test_its_pages_go_where_those_of_the_model_go(
    itself: Model, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft-model pages follow the pages of the model: to other sequences, to copies, to the host and back."""
    if changes.pop("swap", 0):
        monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    llm = LLM(itself, **{**SETTINGS, "max_num_seqs": 5, **changes})
    params = SamplingParams(n=2, temperature=1.0, max_tokens=40, seed=3, ignore_eos=True)
    for _ in range(2):  # the second run hits the prefix cache
        llm.generate(PROMPTS, params)
    stats = llm.engine.stats()
    assert stats.prefix_hits > 0
    assert sum(stats.preemptions.values()) > 0 or not changes
    assert stats.draft_tokens > 100
    assert right(stats) > 0.99


def test_it_catches_up_with_what_it_has_not_seen(itself: Model) -> None:
    """While the batch is full nothing is drafted, and the keys of the draft model are not computed."""
    llm = LLM(itself, **{**SETTINGS, "max_num_seqs": 5, "num_speculative_tokens": 4})
    long, short = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (120, 70))
    llm.generate([PROMPTS[1]] + [PROMPTS[0]] * 4, [long] + [short] * 4)
    stats = llm.engine.stats()
    assert stats.draft_tokens > 20
    assert right(stats) == 1.0


@pytest.mark.parametrize("vocab", [90, 130])
def test_its_vocabulary_may_be_padded_otherwise(itself: Model, vocab: int) -> None:
    """Tokens unknown to the model are never drafted; tokens unknown to the draft are rejected; no output changes."""
    draft = random_model(vocab_size=vocab)  # the same weights except for missing or extra tokens
    llm, plain = LLM(itself.replace(draft=draft), **SETTINGS), LLM(itself, **{**SETTINGS, "speculative": None})
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=3, ignore_eos=True, logprobs=1)
    prompts = [*PROMPTS, [96, 95, 94, 1, 2]]
    found = llm.generate(prompts, params)
    assert [each.outputs for each in found] == [each.outputs for each in plain.generate(prompts, params)]
    stats = llm.engine.stats()
    assert stats.draft_tokens > 100
    assert 0 < right(stats) < 1 if vocab == 90 else right(stats) == 1


def test_a_request_without_drafts_is_none_of_its_business(itself: Model) -> None:
    llm = LLM(itself, **SETTINGS)
    llm.generate(PROMPTS, SamplingParams(max_tokens=10, speculation={"enabled": False}))
    assert llm.engine.stats().draft_tokens == 0


def windowed(model: Model, window: int) -> Model:
    cache = dataclasses.replace(model.cache_spec, layers=(LayerSpec(window=window),) * len(model.cache_spec.layers))
    return model.replace(cache_spec=cache)


REFUSED: dict[str, tuple[Model | None, dict[str, Any], str]] = {
    "none": (None, {}, "speculative = draft_model needs speculative_model: a folder or a hub id"),
    "vocabulary": (
        random_model(vocab_size=226),
        {},
        "speculative_model = random cannot draft: its vocabulary has 226 tokens, the model's 97",
    ),
    "context": (
        random_model(max_position_embeddings=100),
        {},
        "speculative_model = random cannot draft: it knows 100 tokens of context, and max_model_len = 160",
    ),
    "window": (
        windowed(random_model(), 32),
        {},
        r"it has layers with a window of 32 tokens \(None: all\), and the model keeps pages for \(None,\)",
    ),
    "no drafts": (None, {"speculative": "ngram", "speculative_model": "x"}, "speculative_model = x is used with"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_compiled(name: str) -> None:
    draft, changes, reason = REFUSED[name]
    with pytest.raises(EngineConfigError, match=reason):
        plan_engine(random_model().replace(draft=draft), EngineConfig(**{**SETTINGS, **changes}), "cpu")


def test_what_it_is_not_spread_over() -> None:
    changes = {"enable_dp_attention": True, "expert_parallel_size": 2}
    with pytest.raises(EngineConfigError, match="draft_model and enable_dp_attention = True exclude each other"):
        check(EngineConfig(**{**SETTINGS, **changes}))


def test_what_is_accepted_has_the_models_distribution() -> None:
    """Third tokens of answers, some drawn in the row of an accepted draft: their position in the model's own cumulative
    distribution, given the tokens before, is uniform (chi-square)."""
    model, prompt, chance = random_model(gain=9.0), PROMPTS[1], np.random.default_rng(0)
    llm = LLM(model.replace(draft=random_model(gain=7.0)), **{**SETTINGS, "max_num_seqs": 8})
    answers = list[tuple[int, ...]]()
    for seeds in itertools.batched(range(600), 3):  # five rows are left for drafts
        params = [SamplingParams(temperature=1.0, max_tokens=3, seed=seed, ignore_eos=True) for seed in seeds]
        answers += [answer.outputs[0].token_ids for answer in llm.generate([prompt] * len(seeds), params)]
    assert 0.2 < right(llm.engine.stats()) < 0.9
    logits = np.asarray(model.apply(model.params, jnp.asarray([[*prompt, *answer[:2]] for answer in answers])))

    def p_of(shares: np.ndarray) -> float:
        """Return the p-value, tokens ordered by likelihood: other distributions shift draws towards unlikely tokens."""
        own = np.take_along_axis(shares, np.array([answer[2:] for answer in answers]), axis=1)
        above = np.where(shares > own, shares, 0).sum(axis=1, keepdims=True) + own * chance.random(own.shape)
        return p_value((above[:, 0] * 12).astype(int).clip(0, 11), np.full(12, 1 / 12))

    of_second, of_third = scipy.special.softmax(logits[:, -2:].astype(np.float64), axis=-1).swapaxes(0, 1)
    assert p_of(of_third) > 1e-3
    assert p_of(of_second) < 1e-3, "the test can tell"


def test_its_weights_and_pages_are_counted() -> None:
    model, config = random_model(), EngineConfig(**SETTINGS)
    draft = random_model(seed=1, num_hidden_layers=1)
    alone = plan_engine(model, dataclasses.replace(config, speculative="ngram"), "cpu").needs
    both = plan_engine(model.replace(draft=draft), config, "cpu").needs
    own = plan_engine(draft, dataclasses.replace(config, speculative="ngram"), "cpu").needs
    assert both.page == alone.page + own.page
    assert both.weights == alone.weights + own.weights


def test_an_edited_one_is_checked_as_its_model_is() -> None:
    draft = random_model(seed=1)
    short = {name: leaf for name, leaf in draft.params.items() if name != "final_norm"}
    with pytest.raises(ValueError, match=r"final_norm\.scale is missing from params"):
        LLM(random_model().replace(draft=draft.replace(params=short)), **SETTINGS)
    llm = LLM(random_model().replace(draft=draft), dtype="bfloat16", **SETTINGS)
    assert llm.model.draft is not None
    assert llm.model.draft.dtype == llm.model.dtype == "bfloat16"


class Names(list):
    """A list of the model names that are loaded."""

    def load(self, name: str, model: Model) -> Model:
        """Record the name of a draft model to load, and return a random model."""
        self.append(name)
        return random_model(seed=1)


@pytest.mark.parametrize(
    ("name", "own", "asked", "loaded"),
    [
        ("demo", False, None, ["demo-draft"]),
        ("demo", False, "x", ["x"]),
        ("demo", True, None, []),
        ("other", True, "x", ["x"]),
        ("other", True, None, []),
        ("other", False, None, []),
    ],
)
def test_which_model_drafts(name: str, own: bool, asked: str | None, loaded: list[str]) -> None:
    """The draft model is the named one, else the model's own, else that of the demo model."""
    draft, names = (random_model() if own else None), Names()
    config = EngineConfig(speculative="draft_model", speculative_model=asked)
    model = with_draft(random_model().replace(name=name, draft=draft), config, names.load)
    assert names == loaded
    assert (model.draft is draft) == (not loaded)
    assert with_draft(model, EngineConfig(), names.load) is model


def test_the_demo_model_has_one() -> None:
    settings = {**SETTINGS, "prefill_sizes": (16,), "page_size": 16}
    llm = LLM("demo", dtype="float32", show_progress=False, **settings)
    assert llm.model.draft is not None
    assert llm.model.draft.name == "demo-draft"
    llm.generate(["ROMEO:"], SamplingParams(temperature=0, max_tokens=60))
    assert right(llm.engine.stats()) > 0.2
