"""Select the test files that a change touches, in every tier; ``.ci/run`` runs all of these first.

python -m tests.affected            environment and path of each test file, those touched by the latest commit first
python -m tests.affected --rest     the test files that the change does not touch, rotated by commit count

A change is everything committed since ``--base`` plus uncommitted changes. It touches a test file

- that it changes, or whose helpers or conftest.py it changes;
- in the folder that mirrors the changed module's package (jaxinfer/kv/radix.py: all of tests/kv), or in the nearest
  existing parent of that folder;
- that imports the changed module, or, for a kernel, any module of its op;
- that names a changed file which is not a module (protos, templates, golden files).
"""

import argparse
import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests.import_rules import PACKAGES, SCRIPTS, Module, read_modules, resolve
from tests.tiers import environment_of, is_slow

REPO = pathlib.Path(__file__).resolve().parent.parent
ALWAYS = (
    "pyproject.toml",
    "Makefile",
    "CHANGELOG.md",
    "README.md",
    ".gitignore",
    "tests/conftest.py",
    "tests/tiers.py",
)
"""Files shared by all tests and therefore not matched to any: `make test` and the demo run in any case."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="commit that the change begins after (default: see default_base)")
    parser.add_argument("--rest", action="store_true", help="files of the slow tier that are not touched")
    options = parser.parse_args(arguments)
    suite = Suite(REPO)
    touched = suite.touched_by(changed_files(REPO, options.base or default_base(REPO)))
    files = suite.rest(touched, int(_git(REPO, "rev-list", "--count", "HEAD"))) if options.rest else touched
    for file in files:
        for environment in _environments(REPO / file):
            print(environment, file)
    return 0


def default_base(repo: pathlib.Path) -> str:
    """Return the merge base with origin; on origin's own branch, the last commit a day older than the newest.

    A clone of the main branch cannot tell which commits are new. A base that is too old costs only time: tests are
    ordered by the commits that touch them, newest first.
    """
    origin = subprocess.run(
        ["git", "merge-base", "HEAD", "origin/HEAD"], cwd=repo, capture_output=True, text=True
    ).stdout.strip()
    if origin and origin != _git(repo, "rev-parse", "HEAD"):
        return origin
    newest = int(_git(repo, "log", "-1", "--format=%ct"))
    older = _git(repo, "rev-list", "-1", f"--before={newest - 24 * 3600}", "HEAD")
    return older or _git(repo, "rev-list", "--max-parents=0", "HEAD").split()[-1]


def changed_files(repo: pathlib.Path, base: str) -> list[str]:
    """Return the paths that differ from ``base``: uncommitted first, then those of the latest commit, and so on."""
    pending = [line[3:].rpartition(" -> ")[2] for line in _git(repo, "status", "--porcelain", "-uall").splitlines()]
    committed = _git(repo, "log", "--name-only", "--format=", f"{base}..HEAD").splitlines()
    return list(dict.fromkeys(path for path in (*pending, *committed) if path))


class Suite:
    """The test files of a source tree and the modules that each of them imports."""

    def __init__(self, repo: pathlib.Path) -> None:
        self.repo = repo
        self.modules = read_modules(repo, ("tests",))
        files = [path for top in (*PACKAGES, *SCRIPTS) for path in (repo / top).rglob("*.py")]
        self.names = {_dotted(path.relative_to(repo).as_posix()) for path in files} | set(self.modules)
        self.tests = sorted(path.relative_to(repo).as_posix() for path in (repo / "tests").rglob("test_*.py"))

    def touched_by(self, changed: Sequence[str]) -> list[str]:
        """Return the test files that a change of these paths touches, in the order of the paths."""
        found = dict[str, None]()
        for path in changed:
            if path not in ALWAYS:
                found |= dict.fromkeys(test for test in self.tests if self._touches(pathlib.PurePosixPath(path), test))
        return list(found)

    def rest(self, touched: Sequence[str], turn: int) -> list[str]:
        """Return all other files, rotated by ``turn`` so that each file is first at some turn."""
        others = sorted(set(self.tests) - set(touched))
        start = turn * 37 % max(len(others), 1)
        return others[start:] + others[:start]

    def _touches(self, path: pathlib.PurePosixPath, test: str) -> bool:
        if path.name == "conftest.py":
            return pathlib.PurePosixPath(test).is_relative_to(path.parent)
        if path.suffix != ".py":
            return any(path.name in self._strings(name) for name in (_dotted(test), *self._helpers(test)))
        name = _dotted(path.as_posix())
        return name in (_dotted(test), *self._helpers(test)) or self._mirrors(path, test) or self._imports(test, name)

    def _mirrors(self, path: pathlib.PurePosixPath, test: str) -> bool:
        """Whether a test is in the folder that mirrors the module's package, or is named after a top-level module."""
        top, *folders = path.parent.parts or ("",)
        if top == "pallas_kernels":
            return False  # tests/kernels does not mirror the ops: imports decide
        if top == "jaxinfer" and not folders:
            return pathlib.PurePosixPath(test).stem == f"test_{path.stem}"
        mirror = pathlib.PurePosixPath("tests", *([] if top == "jaxinfer" else [top]), *folders)
        while len(mirror.parts) > 2 and not self._has_tests(mirror):
            mirror = mirror.parent
        return top in (*PACKAGES, *SCRIPTS) and pathlib.PurePosixPath(test).is_relative_to(mirror)

    @functools.cache  # noqa: B019
    def _has_tests(self, folder: pathlib.PurePosixPath) -> bool:
        return any(pathlib.PurePosixPath(test).is_relative_to(folder) for test in self.tests)

    def _imports(self, test: str, name: str) -> bool:
        unit = _unit(name)
        return any(to == unit or to.startswith(f"{unit}.") for to in self._reached(test))

    @functools.cache  # noqa: B019 one suite per process
    def _reached(self, test: str) -> frozenset[str]:
        """Return the modules that a test file or one of its helpers imports."""
        return frozenset(to for name in (_dotted(test), *self._helpers(test)) for to in self._direct(name))

    @functools.cache  # noqa: B019
    def _helpers(self, test: str) -> frozenset[str]:
        """Return the modules of ``tests`` that a test file imports, directly or indirectly."""
        seen, todo = set[str](), [_dotted(test)]
        while todo:
            more = {name for name in self._direct(todo.pop()) if name.startswith("tests.")} - seen
            todo += more
            seen |= more
        return frozenset(seen)

    @functools.cache  # noqa: B019
    def _direct(self, name: str) -> frozenset[str]:
        if (module := self.modules.get(name)) is None:
            return frozenset()
        return frozenset(to for target in _names(module) if (to := resolve(target, self.names)))

    @functools.cache  # noqa: B019
    def _strings(self, name: str) -> str:
        """Return the string constants of a test file or helper, joined: file names occur in them."""
        nodes = self.modules[name].nodes if name in self.modules else []
        return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _names(module: Module) -> Iterator[str]:
    """Yield the imports of a module and the strings that name a module (commands started as ``-m NAME``)."""
    yield from (target for _, target in module.imports)
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(PACKAGES + SCRIPTS):
            yield node.value


def _unit(name: str) -> str:
    """Return what a test must import to be touched: the module itself, or for a kernel the package of its op."""
    return ".".join(name.split(".")[:2]) if name.startswith("pallas_kernels.") else name


def _dotted(path: str) -> str:
    return ".".join(pathlib.PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def _environments(path: pathlib.Path) -> Iterator[str]:
    """Yield the environments of those tests in a file that `make test` leaves out."""
    source, place = path.read_text(encoding="utf-8"), environment_of(path)
    if place != "host" or is_slow(path) or "mark.slow" in source:
        yield place
    if "mark.parity" in source:
        yield "parity"


def _git(repo: pathlib.Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=repo, capture_output=True, text=True, check=True).stdout.strip("\n")


if __name__ == "__main__":
    sys.exit(main())
