"""Run the first block of docs/trainers.md; its assertions hold. The others need google-tunix and a large model."""

import pathlib
import re


def test_the_block_runs(repo: pathlib.Path):
    page = (repo / "docs/trainers.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    exec(compile(block, "docs/trainers.md", "exec"), {})
