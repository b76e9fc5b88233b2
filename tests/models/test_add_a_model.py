"""Run the blocks of docs/add_a_model.md in order; their assertions hold."""

import pathlib
import re
import sys
import types
from typing import Any

import pytest

from jaxinfer.models.model import abstract
from jaxinfer.models.registry import FAMILIES


def blocks_of(repo: pathlib.Path) -> list[str]:
    page = (repo / "docs" / "add_a_model.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


@pytest.mark.slow
def test_the_page_runs(repo: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page runs as a module, because dataclasses look up their module by name."""
    module: Any = types.ModuleType("neox_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    known = dict(FAMILIES)
    for block in blocks_of(repo):
        exec(compile(block, "docs/add_a_model.md", "exec"), module.__dict__)
    assert len(module.sample.token_ids) == 8
    assert known == FAMILIES
    assert abstract(module.pythia_160m, "float16").family is FAMILIES["GPTNeoXForCausalLM"]


def test_the_family_is_short(repo: pathlib.Path) -> None:
    config, module, specs, family, *_ = blocks_of(repo)
    lines = [line for line in (config + module + specs + family).splitlines() if line.strip()]
    assert len(lines) < 100
