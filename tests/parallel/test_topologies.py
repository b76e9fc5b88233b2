"""Whole deployments compiled for absent H100s: bytes, collectives, no gathered and no moved arrays."""

import dataclasses

import pytest

from pallas_kernels.check.plugins import default_folder
from tests.gpu_plugins import needs_plugins
from tools.check_programs.__main__ import run
from tools.check_programs.topologies import TOPOLOGIES
from tools.check_programs.work import Work

pytestmark = needs_plugins


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        dataclasses.replace(TOPOLOGIES["Mixtral-8x7B, EP4 x TP2"], layers=2),
        Work("GLM-4.6", pages=2000, tensor=8, layers=5),  # three dense layers first
    ],
    ids=str,
)
def test_some_layers_of_a_mixture_on_eight_gpus_keep_the_rules(work: Work):
    (part,) = run(work, default_folder())
    kinds = {name for name in part.programs if not name.startswith("decode_")}
    assert kinds == {"decode", "prefill", "prefill_logprobs"}
    assert part.broken == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers"),
    [("Llama-3.1-70B, TP8", 4), ("Llama-3.1-405B, TP8 x PP2", 4), ("Mixtral-8x7B, EP4 x TP2", 2)],
)
def test_norms_of_some_tokens_turn_each_sum_into_a_pair(name, layers):
    plain = dataclasses.replace(TOPOLOGIES[name], layers=layers)
    spread = run(dataclasses.replace(plain, norms=True), default_folder())
    for part, before in zip(spread, run(plain, default_folder()), strict=True):
        assert part.programs["decode"] == before.programs["decode"]
        prefills = [program for name, program in part.programs.items() if not name.startswith("decode")]
        assert [one for program in prefills for one in program.findings if one.broken] == []
        assert part.programs["prefill"].temporaries < before.programs["prefill"].temporaries


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_deployment_keeps_the_rules(name):
    """At full depth, with a pool that fills the device next to the weights."""
    work = TOPOLOGIES[name]
    parts = run(work, default_folder())
    assert [part.number for part in parts] == list(range(work.stages))
    assert [(part.number, one) for part in parts for one in part.broken] == []
    assert all(part.compiled > 60e9 for part in parts)
