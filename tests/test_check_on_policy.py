"""`jaxinfer check-on-policy`: the report, its text and the exit code."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.check_on_policy import Difference, Report, Sequences, check, lines, main, requests
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import RequestError
from tests.fakes import random_model

SETTINGS = {"max_num_seqs": 4, "max_model_len": 128, "num_pages": 64, "page_size": 16, "prefill_sizes": (16, 32)}
FLAGS = ["--max-num-seqs=4", "--max-model-len=64", "--num-pages=32", "--prefill-sizes=64", "--sequences=6"]


def test_an_engine_has_the_bits_of_a_training_step():
    llm = LLM(random_model(), **SETTINGS)
    report = check(llm, sequences=18, max_tokens=6)
    assert report.refused == llm.served_programs().exceptions
    assert report.exact == Difference(tokens=report.applied.tokens, largest=0, kl=0)
    assert report.passed
    assert report.applied.tokens >= 18 * 6
    assert 0 < report.applied.largest < 1e-4
    assert 0 < report.applied.kl < 1e-8


def test_a_refusal_is_reported_and_no_pass():
    report = check(LLM(random_model(), **SETTINGS, exactness="relaxed"), sequences=2, max_tokens=3)
    assert report.exact is None
    assert not report.passed
    assert "relaxed" in report.refused["all requests"]
    assert sum("relaxed" in line for line in lines(report)) == 1


def test_differences_are_those_of_generated_tokens():
    served = np.array([[0, -1.0, -2.0], [-3.0, 0, 0]], np.float32)
    sequences = Sequences(np.ones((2, 4), np.int32), np.array([2, 1]), np.array([4, 2]), served)
    shift = np.array([[9, 0.5, 0], [-0.25, 9, 9]])
    found = sequences.difference(lambda tokens, *_: np.pad(served + shift, ((0, len(tokens) - 2), (0, 0))))
    differences = np.array([0.5, 0, -0.25])
    assert (found.tokens, found.largest) == (3, 0.5)
    assert found.kl == pytest.approx(np.mean(np.exp(differences) - 1 - differences))
    assert sequences.difference(lambda tokens, *_: jnp.full((len(tokens), 3), jnp.nan)).largest == np.inf


def test_a_difference_is_no_pass():
    same, other = Difference(3, 0.0, 0.0), Difference(3, 1e-7, 1e-15)
    assert [Report(exact, other, {}).passed for exact in (same, other, None)] == [True, False, False]
    assert [Report(same, other, {}, adapted).passed for adapted in (same, other)] == [True, False]


def test_requests_with_an_adapter_have_a_difference_of_their_own():
    settings = {**SETTINGS, "max_num_seqs": 2, "prefill_sizes": (32,), "max_loras": 1, "max_lora_rank": 4}
    llm = LLM(random_model(), **settings, enable_lora=True)
    report = check(llm, sequences=8, max_tokens=4)
    assert report.exact is not None
    assert report.adapted == Difference(tokens=report.adapted.tokens, largest=0, kl=0)
    assert report.adapted.tokens + report.exact.tokens >= 8 * 4
    assert min(report.adapted.tokens, report.exact.tokens) > 0
    assert sum("with an adapter" in line for line in lines(report)) == 1
    assert llm.list_loras() == []


def test_prompts_share_prefixes_and_samples_are_as_many_as_asked():
    llm = LLM(random_model(), **SETTINGS)
    prompts, params = requests(llm, sequences=40, max_tokens=8, seed=1)
    assert 40 <= sum(each.n for each in params) <= 41
    assert len({prompt[0] for prompt in prompts[::3] if len(prompt) > 9}) < len(prompts[::3]) // 2
    assert {len(prompt) < 16 for prompt in prompts} == {True, False}
    with pytest.raises(RequestError) as error:
        requests(llm, sequences=1, max_tokens=128, seed=0)
    assert error.value.field == "max_tokens"


@pytest.mark.slow
def test_the_command_passes_on_the_demo_model(capsys):
    assert main(["demo", *FLAGS, "--max-tokens", "4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["exact"]["largest"] == 0
    assert printed["exact"]["tokens"] >= 24


def test_errors_end_the_command_with_a_sentence(capsys):
    assert main(["demo", *FLAGS, "--max-tokens", "64"]) == 2
    assert "max_tokens" in capsys.readouterr().err
    assert main(["demo", *FLAGS, "--sequences", "0"]) == 2
