"""Run the blocks of docs/python.md in order; their assertions hold."""

import pathlib
import re


def test_the_page_runs(repo: pathlib.Path) -> None:
    page = repo / "docs" / "python.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert repr(names["llm"]) == "<LLM: closed>"
