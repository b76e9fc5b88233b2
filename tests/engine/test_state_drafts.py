"""Drafts for models with states: tokens and logprobs are bitwise identical to those without drafts."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import EngineConfig, EngineConfigError, resolve
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import SamplingParams, Speculation
from jaxinfer.spec import Drafted, Tree, register
from tests.engine.test_identity import MODES, ROOMY, SETTINGS, Requests, alone, check_mode, make_requests
from tests.engine.test_invariance import bits
from tests.engine.test_states import hybrid
from tests.engine.test_structured import asked
from tests.fakes import random_head, random_model
from tests.models.parity import load_case
from tests.models.test_parity import golden
from tests.serve.fake_engine import VOCAB as BYTES
from tests.serve.fake_engine import fake_tokenizer

DRAFTS: dict[str, Any] = {"num_speculative_tokens": 7, "speculative_adaptive": False, "max_num_seqs": 3}
TYPICAL = Speculation(acceptance="typical")
KINDS = {"delta": None, "mamba": "granitemoehybrid-hub", "conv": "lfm2-hub", "both": "falcon_h1-hub"}
SLOW = ("mamba", "conv", "both")
MORE = ("drafts of an adversary", "drafts, recomputed")


class Prompter:
    """A drafter that proposes a random number of true tokens, then wrong ones."""

    texts: ClassVar[list[list[int]]] = []

    def __init__(self) -> None:
        self._chance = np.random.default_rng(0)

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        known = sequence.tokens.tolist()
        for text in self.texts:
            if text[: len(known)] == known:
                true = int(self._chance.integers(0, limit + 1))
                said = text[len(known) :][:limit]
                return Tree.chain(np.array([token if at < true else (token + 1) % 64 for at, token in enumerate(said)]))
        return Tree.chain(np.zeros(0, np.int64))

    def end(self, sequence: Drafted) -> None: ...
    def reset(self) -> None: ...


register("prompter", lambda config: Prompter())


def model_of(kind: str, folder: pathlib.Path) -> Model:
    name = KINDS[kind]
    return hybrid() if name is None else load_case(golden(name), folder)


def without_drafts(model: Model, count: int) -> tuple[Requests, list[Any]]:
    """Return requests with long answers and their results alone, which `Prompter` then proposes."""
    requests = make_requests(count, model.config.vocab_size, longest=60)
    expected = alone(model, requests, **SETTINGS)
    pairs = zip(requests, expected, strict=True)
    Prompter.texts = [prompt + sample[0] for (prompt, _), output in pairs for sample in output[:-1]]
    return requests, expected


def some_true(stats: EngineStats) -> bool:
    return 0.2 * stats.draft_tokens < stats.draft_accepted < 0.8 * stats.draft_tokens


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in KINDS])
def test_what_is_said_does_not_depend_on_drafts(kind: str, tmp_path: pathlib.Path):
    """Results are unchanged in batches, across page boundaries, after preemptions and after prefix hits."""
    model = model_of(kind, tmp_path)
    requests, expected = without_drafts(model, 14)

    def happened(stats: EngineStats) -> bool:
        found = stats.prefix_hits > 0 or not llm.engine.calibration.exact_resume  # depends on the processor
        return some_true(stats) and stats.preemptions["recompute"] > 0 and found

    llm = LLM(model, **{**SETTINGS, **DRAFTS}, speculative="prompter", num_pages=14, num_states=6)
    check_mode(llm, requests, expected, happened)


def test_drafts_that_are_likely_enough_are_in_the_state():
    """Accepted tokens that were not sampled are in the state: logprobs after them match `model.apply`."""
    model = hybrid()
    params = SamplingParams(temperature=1.0, max_tokens=60, logprobs=1, seed=1, speculation=TYPICAL, ignore_eos=True)
    prompts = [[number, *range(10 + number)] for number in range(4)]
    llm = LLM(model, **{**SETTINGS, **DRAFTS}, speculative="adversary", num_pages=ROOMY)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        sample = output.outputs[0]
        expected = jax.nn.log_softmax(model.apply(model.params, jnp.array([prompt + sample.token_ids]))[0])
        for step, (token, logprobs) in enumerate(zip(sample.token_ids, sample.logprobs or [], strict=True)):
            assert logprobs[token].logprob == pytest.approx(float(expected[len(prompt) + step - 1, token]), abs=2e-5)
    stats = llm.engine.stats()
    assert 20 < stats.draft_accepted < stats.draft_tokens


@pytest.mark.slow
def test_what_a_grammar_forces_goes_into_the_state():
    model = hybrid(vocab_size=BYTES).replace(tokenizer=fake_tokenizer())
    plain, forced = (LLM(model, **SETTINGS, num_pages=ROOMY, speculative=method) for method in (None, "grammar"))
    for number in range(6):
        params = SamplingParams(
            temperature=number % 2, seed=number, max_tokens=60, logprobs=2, structured_outputs=asked(number)
        )
        (want,), (found,) = (llm.generate([[3 + number]], params) for llm in (plain, forced))
        assert bits(found) == bits(want)
    assert forced.engine.stats().draft_accepted > 10


def test_a_later_turn_goes_on_behind_drafts(tmp_path: pathlib.Path):
    """A later turn resumes from page states that accepted drafts filled."""
    model = model_of("conv", tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=1, ignore_eos=True)
    prompts = [[number, *range(10 + number)] for number in range(8)]
    plain = LLM(model, **SETTINGS, num_pages=ROOMY, num_states=128)
    outputs = zip(prompts, plain.generate(prompts, params), strict=True)
    turns = [prompt + output.outputs[0].token_ids for prompt, output in outputs]
    Prompter.texts = turns
    changes: dict[str, Any] = {**DRAFTS, "speculative": "prompter", "exactness": "relaxed"}
    llm = LLM(model, **{**SETTINGS, **changes}, num_pages=ROOMY, num_states=128)
    llm.generate(prompts, params)
    for turn in turns:
        again = [turn[:65]], dataclasses.replace(params, max_tokens=4)
        plain.engine.reset_prefix_cache()
        hits = llm.engine.stats().prefix_hits
        (want,), (found,) = plain.generate(*again), llm.generate(*again)
        assert llm.engine.stats().prefix_hits - hits == 64
        assert found.outputs[0].cumulative_logprob == pytest.approx(want.outputs[0].cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("method", ["ngram", pytest.param("suffix", marks=pytest.mark.slow)])
def test_what_was_said_before_comes_true_and_fails(method: str):
    model = hybrid()
    rng, params = np.random.default_rng(0), SamplingParams(temperature=0.0, max_tokens=70, logprobs=1, ignore_eos=True)
    requests = [((rng.integers(0, 97, 9).tolist() * 8)[: 20 + 9 * number], params) for number in range(4)]
    expected = alone(model, requests, **SETTINGS)

    def happened(stats: EngineStats) -> bool:
        return 0 < stats.draft_accepted < stats.draft_tokens

    check_mode(LLM(model, **{**SETTINGS, **DRAFTS}, speculative=method, num_pages=ROOMY), requests, expected, happened)


@pytest.mark.parametrize("mode", ["a draft model", *(pytest.param(mode, marks=pytest.mark.slow) for mode in MORE)])
def test_modes_of_drafts(mode: str):
    model = hybrid()
    requests, expected = without_drafts(model, 10)
    changes, _ = MODES[mode]
    llm = LLM(
        model.replace(draft=random_model(seed=1, num_hidden_layers=1)), **{**SETTINGS, "num_pages": ROOMY, **changes}
    )
    check_mode(llm, requests, expected, lambda stats: stats.draft_tokens > stats.draft_accepted)


@pytest.mark.parametrize(
    "method", ["eagle3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("eagle", "medusa"))]
)
def test_heads_draft(method: str):
    model = hybrid()
    requests, expected = without_drafts(model, 8)
    changes: dict[str, Any] = {**SETTINGS, **DRAFTS, "num_speculative_tokens": 3, "max_num_seqs": 8}
    llm = LLM(model.replace(draft=random_head(method, model)), **changes, speculative=method, num_pages=ROOMY)
    check_mode(llm, requests, expected, lambda stats: stats.draft_tokens > stats.draft_accepted)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"speculative_tree": 2}, "speculative_tree = 2 cannot be with a model that has states"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2 cannot be with a model that has states"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], named: str):
    config, model = EngineConfig(**{**SETTINGS, "speculative": "ngram", **settings}), hybrid()
    with pytest.raises(EngineConfigError, match=named):
        resolve(config, model.cache_spec, max_position=512, itemsize=4)
