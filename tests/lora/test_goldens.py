"""Adapters that PEFT has written give PEFT's logits."""

import pathlib

import pytest

from jaxinfer.lora.merge import merge_lora
from tests.lora.goldens import GOLDENS, faults, golden, load_base, read
from tools.oracle.cases.adapters import ADAPTERS

NAMES = [case.name for case in ADAPTERS]


def test_golden_files_are_those_of_the_cases():
    assert sorted(path.name for path in GOLDENS.iterdir()) == sorted(NAMES)
    assert sum(path.stat().st_size for path in GOLDENS.rglob("*")) < 1_500_000


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_peft(name: str, tmp_path: pathlib.Path):
    case = golden(name)
    model = load_base(case, tmp_path)
    assert faults(case, merge_lora(model, read(GOLDENS / name, model))) == []
    assert faults(case, model) != []
