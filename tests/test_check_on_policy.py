"""`jaxinfer check-on-policy`: the report, its text and the exit code."""

from __future__ import annotations

import json

import pytest

from jaxinfer.agreement import Difference
from jaxinfer.check_on_policy import Report, check, lines, main
from jaxinfer.llm import LLM
from tests.fakes import random_model

SETTINGS = {"max_num_seqs": 4, "max_model_len": 128, "num_pages": 64, "page_size": 16, "prefill_sizes": (16, 32)}
FLAGS = ["--max-num-seqs=4", "--max-model-len=64", "--num-pages=32", "--prefill-sizes=64", "--sequences=6"]


def test_an_engine_has_the_bits_of_a_training_step():
    llm = LLM(random_model(), **SETTINGS)
    report = check(llm, sequences=18, max_tokens=6)
    assert report.refused == llm.served_programs().exceptions
    assert report.forced == report.exact == Difference(tokens=report.applied.tokens, largest=0, kl=0)
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


def test_a_difference_is_no_pass():
    same, other = Difference(3, 0.0, 0.0), Difference(3, 1e-7, 1e-15)
    pairs = [(same, same), (same, other), (other, same), (same, None)]
    assert [Report(*pair, other, {}).passed for pair in pairs] == [True, False, False, False]
    assert [Report(same, same, other, {}, adapted).passed for adapted in (same, other)] == [True, False]


def test_requests_with_an_adapter_have_a_difference_of_their_own():
    settings = {**SETTINGS, "max_num_seqs": 2, "prefill_sizes": (32,), "max_loras": 1, "max_lora_rank": 4}
    llm = LLM(random_model(), **settings, enable_lora=True)
    report = check(llm, sequences=8, max_tokens=4)
    assert report.exact is not None
    assert report.adapted == Difference(tokens=report.adapted.tokens, largest=0, kl=0)
    assert report.forced == Difference(tokens=report.adapted.tokens + report.exact.tokens, largest=0, kl=0)
    assert report.forced.tokens >= 8 * 4
    assert min(report.adapted.tokens, report.exact.tokens) > 0
    assert sum("with an adapter" in line for line in lines(report)) == 1
    assert llm.list_loras() == []


@pytest.mark.slow
def test_the_command_passes_on_the_demo_model(capsys):
    assert main(["demo", *FLAGS, "--max-tokens", "4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["forced"]["largest"] == printed["exact"]["largest"] == 0
    assert printed["exact"]["tokens"] >= 24


def test_errors_end_the_command_with_a_sentence(capsys):
    assert main(["demo", *FLAGS, "--max-tokens", "64"]) == 2
    assert "max_tokens" in capsys.readouterr().err
    assert main(["demo", *FLAGS, "--sequences", "0"]) == 2
