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

import tests.typecheck  # noqa: F401 jaxtyping imports only `tests` and then looks the checker up in it
from tests.tiers import is_slow

TESTS = pathlib.Path(__file__).resolve().parent
REPO = TESTS.parent
LEFT_OUT = pytest.StashKey[int]()
SEED = 20261130
"""Seed of engines without one."""
DEFAULT_TIER = "not slow and not parity and not fleet"
"""Default of ``-m`` in pyproject.toml: the tests that run where no marker expression is given."""


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
    """Fix the seeds of Hypothesis and engines; with ``--fresh`` (`make attack`) draw anew, print how to reproduce."""
    settings.register_profile("fixed", deadline=None, derandomize=True)
    settings.register_profile("fresh", deadline=None, print_blob=True)
    settings.load_profile("fresh" if config.getoption("--fresh") else "fixed")
    if not config.getoption("--fresh"):
        # For requests without a seed: an unlucky draw may be a token that the test treats specially.
        secrets.randbits = lambda bits: SEED


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Skip files without a test of the selected tier: importing all files takes longer than running some of them."""
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
    """Whether paths were given without a tier: `pytest tests/quant` also runs files of the slow tier."""
    return str(config.getoption("markexpr")) == DEFAULT_TIER and config.args_source is config.ArgsSource.ARGS


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Skip, with ``--until``, each test that would start after that time."""
    until: float | None = item.config.getoption("--until")
    if until is None or time.time() < until:
        return None
    item.config.stash[LEFT_OUT] = item.config.stash.get(LEFT_OUT, 0) + 1
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--until") is not None:
        session.exitstatus = pytest.ExitCode.OK  # touched files may contain no test of the selected tier
    if hasattr(session.config, "workeroutput"):  # an xdist worker
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
    """Return the root of the source tree."""
    return REPO


@pytest.fixture(scope="module", autouse=True)
def shared_programs() -> None:
    """Share compiled programs between test processes: most programs belong to a few models."""
    if "jax" in sys.modules:
        from jaxinfer.compilations import cache

        cache.DEFAULT_FOLDER = REPO / "build" / "test-programs"
        cache.use_compilation_cache(None)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return 0, the same seed in each run; ``--fresh`` draws one and prints it; ``--seed`` sets it."""
    named: int | None = request.config.getoption("--seed")
    if named is not None or not request.config.getoption("--fresh"):
        return named or 0
    drawn = secrets.randbelow(10**9)
    print(f"repeat with --seed {drawn}")
    return drawn


@pytest.fixture(scope="session")
def test_data() -> pathlib.Path:
    """Return the folder of real inputs: ``$JAXINFER_TEST_DATA``, else ``../shared/data``. Skips if it is absent."""
    asked = os.environ.get("JAXINFER_TEST_DATA")
    folder = pathlib.Path(asked) if asked else REPO.parent / "shared" / "data"
    if asked and not folder.is_dir():
        pytest.fail(f"JAXINFER_TEST_DATA={asked} is not a folder")
    if not folder.is_dir():
        pytest.skip("no test data: put it at ../shared/data or set JAXINFER_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def oracle_python(request: pytest.FixtureRequest, repo: pathlib.Path) -> pathlib.Path:
    """Return the oracle's interpreter, creating its environment if needed. Skips if no suitable Python is found."""
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
    import jax  # host-only tests run without jax

    return jax.default_backend() == "gpu"
