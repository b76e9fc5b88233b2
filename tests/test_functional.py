"""docs/functional.md is a program: its blocks run in order, and its assertions hold."""

import pathlib
import re


def test_the_page_runs(repo: pathlib.Path) -> None:
    page = repo / "docs" / "functional.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 12
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert float(names["change"]) > 0  # type: ignore[arg-type]
