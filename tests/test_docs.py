"""Checks of the documentation: links resolve, make targets exist, the README's Python runs."""

import pathlib
import re

import pytest

from jaxinfer.config.aliases import PRESETS
from tools import draw_packages

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/*.md")


def _documents(repo: pathlib.Path) -> dict[pathlib.Path, str]:
    paths = sorted(path for pattern in DOCUMENTS for path in repo.glob(pattern))
    return {path: path.read_text(encoding="utf-8") for path in paths}


def test_links_lead_to_files(repo: pathlib.Path) -> None:
    links = [
        (path.name, link, path.parent / link)
        for path, text in _documents(repo).items()
        for link in re.findall(r"\]\(([^)#]+)", text)
        if "://" not in link
    ]
    assert links
    assert [(name, link) for name, link, target in links if not target.exists()] == []


def test_make_targets_exist(repo: pathlib.Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (repo / "Makefile").read_text(), re.MULTILINE))
    named = {
        (path.name, word)
        for path, text in _documents(repo).items()
        for command in re.findall(r"(?:^|`)make((?: [a-z-]+\b)+)", text, re.MULTILINE)
        for word in command.split()
    }
    assert named
    assert {(name, word) for name, word in named if word not in known} == set()


def test_the_index_reaches_every_page(repo: pathlib.Path) -> None:
    linked = set(re.findall(r"\]\(([a-z_]+\.md)\)", (repo / "docs/README.md").read_text(encoding="utf-8")))
    assert linked == {path.name for path in repo.glob("docs/*.md")} - {"README.md"}
    assert "docs/README.md" in (repo / "README.md").read_text(encoding="utf-8")


def test_the_tour_names_functions(repo: pathlib.Path) -> None:
    named = re.findall(r"`([a-z0-9_/]+\.py):(\w+)`", (repo / "docs/tour.md").read_text(encoding="utf-8"))
    assert len(named) > 15
    assert [each for each in named if not re.search(rf"\bdef {each[1]}\b", (repo / each[0]).read_text())] == []


def test_the_picture_is_that_of_the_import_rules() -> None:
    """The package diagram is current; `python -m tools.draw_packages` regenerates it."""
    assert draw_packages.PICTURE.read_text(encoding="utf-8") == draw_packages.draw()


def test_the_step_is_that_of_the_engine(repo: pathlib.Path) -> None:
    (block,) = re.findall(
        r"```python\n(.*?)```", (repo / "docs/architecture.md").read_text(encoding="utf-8"), re.DOTALL
    )
    source = [line.strip() for line in (repo / "jaxinfer/engine/core.py").read_text().splitlines()]
    assert [line for line in block.splitlines() if line.strip() not in source] == []


def test_readme_python_runs(repo: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's Python runs; tests/serve/test_docs.py covers server blocks, `make demo` the larger model."""
    found = re.findall(r"```python\n(.*?)```", (repo / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    blocks = [block for block in found if "localhost" not in block]
    (block,) = blocks
    assert 'load_model("demo")' in block
    exec(compile(block.replace('"demo"', '"demo-draft"'), "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_the_rooflines_run_and_the_presets_are_those_of_the_settings(
    repo: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (repo / "docs/performance.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "performance.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 4
    rows = {
        name: dict(re.findall(r"`(\w+)` ([\w.]+)", row))
        for name, row in re.findall(r"^\| `(\S+)` \|(.*?)\|", page, re.M)
    }
    assert rows == {
        name: {setting: f"{value:g}" if isinstance(value, float) else str(value) for setting, value in preset.items()}
        for name, preset in PRESETS.items()
    }


def test_readme_is_one_screen_with_a_table_of_what_there_is(repo: pathlib.Path) -> None:
    """The README has at most 80 lines, and each table row names existing packages."""
    text = (repo / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \| \[[^|]+ \|$", text, re.MULTILINE)
    assert len(rows) >= 10
    components = [component for row in rows for component in re.findall(r"`([^`]+)`", row)]
    assert [
        component
        for component in components
        if not ((repo / "jaxinfer" / component).exists() or (repo / component).exists())
    ] == []
