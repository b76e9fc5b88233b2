"""The house stays one that a reader can hold in the head: how much a room shows, how long files and functions are."""

import ast
import pathlib
import statistics
import tomllib

import pytest

from tests.import_rules import PACKAGES, SCRIPTS, read_modules

FIRST_LOOK, IN_A_ROOM, LINES = 8, 15, 450
MEDIAN, P90 = 6, 16


def entries(folder: pathlib.Path) -> list[str]:
    return [each.name for each in folder.iterdir() if each.name not in ("__init__.py", "__pycache__")]


def test_the_engine_shows_little_at_first_look(repo: pathlib.Path) -> None:
    engine = repo / "jaxinfer/engine"
    assert len(entries(engine)) <= FIRST_LOOK
    for room in (each for each in engine.iterdir() if each.is_dir() and each.name != "__pycache__"):
        assert len(entries(room)) <= IN_A_ROOM, room


def test_files_are_short(repo: pathlib.Path) -> None:
    long = {}
    for package in (*PACKAGES, *SCRIPTS):
        for path in (repo / package).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > LINES and "_pb2" not in path.name:
                long[str(path.relative_to(repo))] = lines
    assert long == {}


def test_functions_are_short(repo: pathlib.Path) -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for name, module in read_modules(repo).items()
        if "_pb2" not in name
        for node in ast.walk(module.tree)
        if isinstance(node, kinds) and node.end_lineno is not None
    )
    assert statistics.median(lengths) <= MEDIAN
    assert lengths[int(0.9 * len(lengths))] <= P90


@pytest.mark.parametrize("word", ["lane", "lanes", "parked"])
def test_words_that_meant_too_much_stay_out(repo: pathlib.Path, word: str) -> None:
    """SIMD lanes alone keep theirs: in Mosaic's layouts and in the sampler's reductions."""
    simd = ("pallas_kernels/layouts.py", "jaxinfer/sampling/")
    found = [
        name
        for name, module in read_modules(repo).items()
        if not name.replace(".", "/").startswith(tuple(each.removesuffix(".py") for each in simd))
        and any(isinstance(node, ast.Name | ast.arg) and word == _name(node) for node in ast.walk(module.tree))
    ]
    assert found == []


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "arg", "")


# Their arrays go to the device as they are, and modules that are checked see them there.
UNCHECKED = {"jaxinfer.kv.manager", "jaxinfer.engine.scheduling.stats"}


def test_the_suite_checks_the_shapes_of_all_signatures(repo: pathlib.Path) -> None:
    options = tomllib.loads((repo / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    (packages,) = (each.partition("=")[2].split(",")[:-1] for each in options if each.startswith("--jaxtyping"))
    shaped = {
        name
        for name, module in read_modules(repo).items()
        if name.startswith(("jaxinfer.", "pallas_kernels."))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"
    }
    assert {name for name in shaped if not any(f"{name}.".startswith(f"{each}.") for each in packages)} == UNCHECKED
