"""Fixtures of the whole suite."""

import os
import pathlib
import secrets
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import settings

import tests.typecheck  # noqa: F401  jaxtyping imports `tests` alone and then looks the checker up in it
from tests.tiers import is_slow

TESTS = pathlib.Path(__file__).resolve().parent
REPO = TESTS.parent
LEFT_OUT = pytest.StashKey[int]()
DEFAULT_TIER = "not slow and not parity and not fleet"
"""As pyproject.toml has it: what runs where ``-m`` is not given."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity")
    group.addoption(
        "--oracle-python", help="interpreter with torch and transformers (default: .venv-oracle, made here)"
    )
    group.addoption("--oracle-seed", type=int, help="first seed of the live comparison (default: a fresh one)")
    group = parser.getgroup("time")
    group.addoption("--until", type=float, help="begin no test after this time (seconds since 1970)")
    group = parser.getgroup("random tests")
    group.addoption("--fresh", action="store_true", help="draw anew what is drawn alike in each run otherwise")
    group.addoption("--seed", type=int, help="of the tests that draw anew: what a failure printed")


def pytest_configure(config: pytest.Config) -> None:
    """Random tests are the same in each run; `make attack` and the slow tier draw anew, and print what repeats them."""
    settings.register_profile("fixed", deadline=None, derandomize=True)
    settings.register_profile("fresh", deadline=None, print_blob=True)
    settings.load_profile("fresh" if config.getoption("--fresh") else "fixed")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Skip files without a test of the tier: to import all of them takes longer than a part of them runs."""
    if not collection_path.match("test_*.py") or _named(config):
        return None
    match str(config.getoption("markexpr")).split():
        case ["not", "slow", *_]:
            return is_slow(collection_path) or None
        case ["slow", *_] if is_slow(collection_path):
            return None
        case ["slow" | "parity" as tier, *_]:
            return f"mark.{tier}" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    if is_slow(item.path) and not _named(item.config):
        item.add_marker("slow")


def _named(config: pytest.Config) -> bool:
    """Paths were given and no tier: `pytest tests/quant` runs files of the slow tier, too."""
    return str(config.getoption("markexpr")) == DEFAULT_TIER and config.args_source is config.ArgsSource.ARGS


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """With ``--until``, leave out what would begin later."""
    until: float | None = item.config.getoption("--until")
    if until is None or time.time() < until:
        return None
    item.config.stash[LEFT_OUT] = item.config.stash.get(LEFT_OUT, 0) + 1
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--until") is not None:
        session.exitstatus = pytest.ExitCode.OK  # files that a change touches need not have a test of the tier
    if hasattr(session.config, "workeroutput"):  # a process of xdist's
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    stash = node.config.stash
    stash[LEFT_OUT] = stash.get(LEFT_OUT, 0) + getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{left_out} tests were not begun: the time was over")


@pytest.fixture(scope="session")
def repo() -> pathlib.Path:
    """The root of the source tree."""
    return REPO


@pytest.fixture(scope="module", autouse=True)
def shared_programs() -> None:
    """Share compiled programs between test processes: few models make most of the programs."""
    if "jax" in sys.modules:
        from jaxinfer.compilations import cache

        cache.DEFAULT_FOLDER = REPO / "build" / "test-programs"
        cache.use_compilation_cache(None)


@pytest.fixture
def fresh_seed(request: pytest.FixtureRequest) -> int:
    """A seed of this run alone, printed when the test fails; ``--seed`` names one."""
    named: int | None = request.config.getoption("--seed")
    seed = secrets.randbelow(10**9) if named is None else named
    print(f"repeat with --seed {seed}")
    return seed


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The same in each run, unless ``--fresh`` asks for another one."""
    fresh: int = request.getfixturevalue("fresh_seed") if request.config.getoption("--fresh") else 0
    return fresh


@pytest.fixture(scope="session")
def test_data() -> pathlib.Path:
    """The folder of real inputs: ``$JAXINFER_TEST_DATA``, else ``../shared/data``. Skips where it is absent."""
    asked = os.environ.get("JAXINFER_TEST_DATA")
    folder = pathlib.Path(asked) if asked else REPO.parent / "shared" / "data"
    if asked and not folder.is_dir():
        pytest.fail(f"JAXINFER_TEST_DATA={asked} is not a folder")
    if not folder.is_dir():
        pytest.skip("no test data: put it at ../shared/data or set JAXINFER_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def oracle_python(request: pytest.FixtureRequest, repo: pathlib.Path) -> pathlib.Path:
    """The oracle's interpreter; its environment is made if need be. Skips where no Python for it can be found."""
    named = request.config.getoption("--oracle-python")
    if named is not None:
        return pathlib.Path(named).absolute()
    made = subprocess.run(
        [repo / "tools/oracle/make_venv.sh", ".venv-oracle"], cwd=repo, capture_output=True, text=True
    )
    if made.returncode == 3:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    return repo / ".venv-oracle/bin/python"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not _has_gpu():
        pytest.skip("needs an NVIDIA GPU that jax can use")


def _has_gpu() -> bool:
    import jax  # the host-only tests run without it

    return jax.default_backend() == "gpu"
