"""Adapters that PEFT has written give PEFT's logits: beside the model, and folded into it."""

import pathlib

import pytest

from jaxinfer.lora.merge import merge_lora
from tests.lora.goldens import GOLDENS, faults, golden, load_base, read
from tools.oracle.cases.adapters import ADAPTERS

NAMES = [case.name for case in ADAPTERS]
STORED = {case.name for case in ADAPTERS if case.storage is not None}
TIED = {"llama-tied-embeddings", "llama-tied-head", "gemma-vocabulary"}


def test_golden_files_are_those_of_the_cases():
    assert sorted(path.name for path in GOLDENS.iterdir()) == sorted(NAMES)
    assert sum(path.stat().st_size for path in GOLDENS.rglob("*")) < 1_500_000


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_peft(name: str, tmp_path: pathlib.Path):
    case = golden(name)
    model = load_base(case, tmp_path)
    adapter = read(GOLDENS / name, model)
    assert faults(case, model.with_lora(adapter)) == []
    assert faults(case, model) != []
    if name in STORED | TIED:
        why = "before it is quantised" if name in STORED else "are one array"
        with pytest.raises(ValueError, match=why):
            merge_lora(model, adapter)
    else:
        assert faults(case, merge_lora(model, adapter)) == []
