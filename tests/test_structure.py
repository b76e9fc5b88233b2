"""Limits on the size of the code base: entries per package, length of files and functions."""

import ast
import functools
import pathlib
import re
import statistics
import subprocess
import tomllib

import pytest

from tests.affected import default_base
from tests.import_rules import PACKAGES, SCRIPTS, Module, read_modules

FIRST_LOOK, IN_A_PACKAGE, LINES = 8, 16, 600
MEDIAN, P90 = 6, 16  # lines of a whole definition
BODY_MEDIAN, BODY_P90 = 5, 12  # lines without head and docstring
# Families are left out: each is a separate file.
MODELS = ("config", "decoder", "family", "head", "model", "registry", "specs")
CORE = (
    *(f"jaxinfer/{name}" for name in ("engine", "kv", "layers", "sampling", "spec", "types.py")),
    *(f"jaxinfer/config/{name}.py" for name in ("__init__", "engine", "cache", "parallel", "speculative", "defaults")),
    *(f"jaxinfer/models/{name}.py" for name in MODELS),
)
SCOPE = "docs/scope.md"
"""A change that makes the core larger says here why, in a line that begins with ``- ``."""


@functools.cache
def modules_of(repo: pathlib.Path) -> dict[str, Module]:
    """Return the modules of the source tree, parsed once for all tests."""
    return read_modules(repo)


@functools.cache
def names_of(repo: pathlib.Path) -> dict[str, frozenset[str]]:
    """Return the names of the variables and arguments of each module."""
    return {
        name: frozenset(_name(node) for node in module.nodes if isinstance(node, ast.Name | ast.arg))
        for name, module in modules_of(repo).items()
    }


def entries(folder: pathlib.Path) -> list[str]:
    return [each.name for each in folder.iterdir() if each.name not in ("__init__.py", "__pycache__")]


def test_the_engine_shows_little_at_first_look(repo: pathlib.Path) -> None:
    engine = repo / "jaxinfer/engine"
    assert len(entries(engine)) <= FIRST_LOOK
    for component in (each for each in engine.iterdir() if each.is_dir() and each.name != "__pycache__"):
        assert len(entries(component)) <= IN_A_PACKAGE, component


def test_files_are_short(repo: pathlib.Path) -> None:
    long = {}
    for package in (*PACKAGES, *SCRIPTS):
        for path in (repo / package).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > LINES and "_pb2" not in path.name:
                long[str(path.relative_to(repo))] = lines
    assert long == {}


def test_the_core_does_not_grow(repo: pathlib.Path) -> None:
    """The core has at most as many lines as at the merge base, or the change adds a line to docs/scope.md."""
    if not (repo / ".git").exists():
        pytest.skip("not a clone")
    base = default_base(repo)
    now, before = core_lines(repo, "--untracked", "^"), core_lines(repo, "^", base)
    assert now <= before or _lines_added(repo, base, SCOPE), f"{now} lines, {before} at {base}"


def core_lines(repo: pathlib.Path, *tree: str) -> int:
    """Return the lines of the core, of all kinds. ``tree``: what `git grep` counts, and where."""
    return sum(int(line.rpartition(":")[2]) for line in _git(repo, "grep", "-c", *tree, "--", *CORE))


def _lines_added(repo: pathlib.Path, base: str, path: str) -> bool:
    return any(line.startswith("+- ") for line in _git(repo, "diff", base, "--", path))


def _git(repo: pathlib.Path, *arguments: str) -> list[str]:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True).stdout.splitlines()


def test_functions_are_short(repo: pathlib.Path) -> None:
    kinds, modules = ast.FunctionDef | ast.AsyncFunctionDef, modules_of(repo)
    ours = [module for name, module in modules.items() if "_pb2" not in name]
    functions = [node for module in ours for node in module.nodes if isinstance(node, kinds)]
    lengths = sorted(_lines(function, function) for function in functions)
    assert statistics.median(lengths) <= MEDIAN
    assert lengths[int(0.9 * len(lengths))] <= P90
    bodies = [each.body[ast.get_docstring(each) is not None :] for each in functions]
    lengths = sorted(_lines(body[0], body[-1]) if body else 0 for body in bodies)
    assert statistics.median(lengths) <= BODY_MEDIAN
    assert lengths[int(0.9 * len(lengths))] <= BODY_P90


def _lines(first: ast.stmt, last: ast.stmt) -> int:
    assert last.end_lineno is not None
    return last.end_lineno - first.lineno + 1


def test_options_of_attention_are_declared_once_on_each_layer(repo: pathlib.Path) -> None:
    """``softcap``, as an example, is declared in `LayerSpec` for models and in `AttentionOptions` for kernels."""
    checked = "pallas_kernels.check."  # its cases name each option
    modules = {name: each.nodes for name, each in modules_of(repo).items() if not name.startswith(checked)}
    declared = [
        name
        for name, nodes in modules.items()
        for node in nodes
        if (isinstance(node, ast.arg) and node.arg == "softcap")
        or (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "softcap")
    ]
    assert declared == ["jaxinfer.types", "pallas_kernels.paged_attention.options"]


@pytest.mark.parametrize("word", ["lane", "lanes", "parked"])
def test_words_that_meant_too_much_stay_out(repo: pathlib.Path, word: str) -> None:
    """Only SIMD lanes keep the word: in Mosaic's layouts and in the sampler's reductions."""
    simd = ("pallas_kernels/layouts.py", "jaxinfer/sampling/")
    found = [
        name
        for name, names in names_of(repo).items()
        if word in names and not name.replace(".", "/").startswith(tuple(each.removesuffix(".py") for each in simd))
    ]
    assert found == []


PRIVATE = re.compile(
    r"\b(doors?|whoever|whomever|nobody|somebody|vouch\w*|(gives?|gave) way|(is|are) told|storeys?|beside|in vain)\b",
    re.IGNORECASE,
)
"""Words that a reader of vLLM, SGLang and JAX would have to translate."""
QUOTED = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)


def private_words(text: str) -> list[str]:
    """Return the private words of a text, code and links left out."""
    return [found[0] for found in PRIVATE.finditer(QUOTED.sub("", text))]


def test_docstrings_begin_in_the_fields_words(repo: pathlib.Path) -> None:
    modules = {**modules_of(repo), **read_modules(repo, ("tests",))}
    found = [
        f"{name}:{statement.lineno}: {words}"
        for name, module in modules.items()
        if "_pb2" not in name
        for node in module.nodes
        if isinstance(getattr(node, "body", None), list)
        for statement in node.body  # type: ignore[attr-defined]
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(text := statement.value.value, str)
        if (words := private_words(re.split(r"(?<=[.:])\s|\n\n", text.strip(), maxsplit=1)[0]))
    ]
    assert found == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs"])
def test_docs_are_in_the_fields_words(repo: pathlib.Path, name: str) -> None:
    pages = sorted((repo / name).glob("*.md")) if name == "docs" else [repo / name]
    assert {page.name: words for page in pages if (words := private_words(page.read_text(encoding="utf-8")))} == {}


def test_private_words_are_found() -> None:
    assert private_words("The door gives way to `nobody`; [it](door.md) lies beside whoever.") == [
        "door",
        "gives way",
        "beside",
        "whoever",
    ]


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "arg", "")


# The device modules that receive their arrays check the shapes.
UNCHECKED = {
    "jaxinfer.kv.manager",
    *(f"jaxinfer.engine.scheduling.{name}" for name in ("encoder_cache", "images", "plan", "stats")),
}


def test_the_suite_checks_the_shapes_of_all_signatures(repo: pathlib.Path) -> None:
    options = tomllib.loads((repo / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    (packages,) = (each.partition("=")[2].split(",")[:-1] for each in options if each.startswith("--jaxtyping"))
    shaped = {
        name
        for name, module in modules_of(repo).items()
        if name.startswith(("jaxinfer.", "pallas_kernels."))
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"
    }
    assert {name for name in shaped if not any(f"{name}.".startswith(f"{each}.") for each in packages)} == UNCHECKED
