"""Every family against transformers: committed golden files here, fresh seeds live under the marker ``parity``."""

import dataclasses
import pathlib
from collections.abc import Callable, Container, Iterable
from typing import Any

import numpy as np
import pytest

from jaxinfer.outputs import CompletionOutput, Logprob, RequestOutput
from jaxinfer.weights.errors import CheckpointError
from tests.models.parity import (
    GOLDENS,
    LIVE_ROOM,
    live_faults,
    load_case,
    logit_faults,
    serve,
    served_faults,
    teacher_forced,
)
from tools.oracle.cases import CASES
from tools.oracle.golden import Golden, load, names

NAMES = [case.name for case in CASES]
OVERLOOKED = {case.name: case.overlooked for case in CASES if case.overlooked}
# Cases run through the engine and live in every check: biases, experts, windows and sinks; latents.
SLICE = ("gpt_oss-hub", "deepseek_v3-hub")
TYPICAL = {case.name for case in CASES if case.served}


ROOM = {"qwen3_5_moe_text-experts": 1.5}
"""Factor of the allowed error where it depends on the CPU: states sum over all tokens, and one step of 32 is off by 1.3
times the rule on a Xeon (AVX-512), and within it on an EPYC."""


def fast(names: Iterable[str], chosen: Container[str]) -> list[Any]:
    """Return all names; those not in ``chosen`` are marked slow."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


def golden(name: str) -> Golden:
    return load(GOLDENS / name)


def test_golden_files_are_those_of_the_cases():
    assert names(GOLDENS) == sorted(NAMES)
    assert sum(path.stat().st_size for path in GOLDENS.rglob("*")) < 9_000_000


@pytest.mark.parametrize("name", fast(NAMES, TYPICAL))
def test_logits_are_those_of_transformers(name: str, tmp_path: pathlib.Path):
    case = golden(name)
    assert logit_faults(case, teacher_forced(load_case(case, tmp_path), case), ROOM.get(name, 1.0)) == []


@pytest.mark.parametrize("name", fast(NAMES, SLICE))
def test_served_tokens_and_logprobs_are_those_of_transformers(name: str, tmp_path: pathlib.Path):
    case = golden(name)
    assert served_faults(case, serve(load_case(case, tmp_path), case)) == []


@pytest.mark.parametrize("name", fast(OVERLOOKED, TYPICAL))
def test_an_overlooked_switch_is_noticed(name: str, tmp_path: pathlib.Path):
    case = golden(name)
    edited = dataclasses.replace(case, config=case.config | OVERLOOKED[name])
    try:
        model = load_case(edited, tmp_path)
    except CheckpointError:
        return  # requires other tensors
    assert logit_faults(case, teacher_forced(model, case)) != []


def test_the_smallest_errors_beyond_the_rule_are_noticed():
    case = golden("llama-mha")
    exact = np.concatenate([case.prefill, case.decode])
    assert logit_faults(case, exact) == []
    for row, error in ((3, case.prefill_error), (len(case.prompt) + 7, case.decode_error[7])):
        for share, faults in ((0.99, 0), (1.01, 1)):
            logits = exact.copy()
            logits[row, 5] += share * (2.0 * error + 1e-6)
            assert len(logit_faults(case, logits)) == faults
    assert len(logit_faults(case, np.full_like(exact, np.nan))) == 1 + 32 + 1


def test_live_errors_beyond_the_rule_are_noticed():
    case = golden("llama-mha")
    length, exact = len(case.prompt), np.concatenate([case.prefill, case.decode])
    errors = 2.0 * np.concatenate([np.full(length, case.prefill_error), case.decode_error]) + 1e-6
    for rows, within, beyond in (
        ((length + 7,), 2.99, 3.01),
        ((3,), 0.99, 1.01),
        (range(length, len(exact)), 0.99, 1.01),
    ):
        for share, faults in ((within, 0), (beyond, 1)):
            logits = exact.copy()
            logits[list(rows), 5] += share * errors[list(rows)]
            assert len(live_faults(case, logits)) == faults


def _answer(case: Golden) -> RequestOutput:
    """Return the output of a server without rounding errors, with all tokens as top logprobs."""
    rows = np.concatenate([case.prefill, case.decode])
    rows = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    positions = [{token: Logprob(float(row[token]), 1, None) for token in range(len(row))} for row in rows]
    length = len(case.prompt)
    output = CompletionOutput(0, token_ids=list(case.greedy), logprobs=positions[length - 1 :])
    return RequestOutput("0", None, case.prompt, [output], 0, [None, *positions[: length - 1]])


def test_served_logprobs_beyond_the_rule_are_noticed():
    case = golden("qwen3-tied-hub")
    assert served_faults(case, _answer(case)) == []
    for at in (0, 9):
        answer = _answer(case)
        answer.prompt_logprobs[at + 1][7] = Logprob(case.prefill[at, 7] + 1.0, 1, None)
        answer.outputs[0].logprobs[at][7] = Logprob(float("nan"), 1, None)
        assert len(served_faults(case, answer)) == 2
    answer = _answer(case)
    answer.outputs[0].token_ids[-1] ^= 1
    assert len(served_faults(case, answer)) == 1


def test_other_weights_than_the_oracles_are_refused(tmp_path: pathlib.Path):
    case = dataclasses.replace(golden("llama-mha"), seed=0)
    with pytest.raises(ValueError, match="not those of the oracle"):
        load_case(case, tmp_path)


def _live_id(name: str) -> str:
    """Return the test id; cases for every check match ``-k slice``."""
    return f"slice-{name}" if name in SLICE else name


@pytest.mark.parity
@pytest.mark.parametrize("name", NAMES, ids=_live_id)
def test_live(name: str, live_golden: Callable[[str], Golden], tmp_path: pathlib.Path):
    case = live_golden(name)
    model = load_case(case, tmp_path)
    assert (case.seed, live_faults(case, teacher_forced(model, case))) == (case.seed, [])
    assert (case.seed, served_faults(case, serve(model, case), LIVE_ROOM)) == (case.seed, [])
