"""Test that the example of docs/text.md runs."""

import pathlib
import re

import pytest


def test_the_example_runs(repo: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo)
    (block,) = re.findall(r"```python\n(.*?)```", (repo / "docs/text.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, "docs/text.md", "exec"), {})
