"""Run the blocks of docs/rl.md in order; their assertions hold."""

import pathlib
import re

import numpy as np


def test_the_page_runs(repo: pathlib.Path) -> None:
    page = repo / "docs" / "rl.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert [np.count_nonzero(np.asarray(names[name])) for name in ("logprobs", "found")] == [2 * 16, 16]
