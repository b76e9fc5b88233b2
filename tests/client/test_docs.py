"""Tests that the programs in the docs of the client run."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.client.serving import served
from tests.serve.fake_engine import Mischief


def test_programs_run(repo: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (repo / "docs" / "client.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    with served(Mischief()) as run:
        for block in blocks:
            assert "localhost:50051" in block
            exec(compile(block.replace("localhost:50051", run.target), "client.md", "exec"), {})
            assert capsys.readouterr().out.strip()
        run.baseline()
