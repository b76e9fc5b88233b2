"""Fixtures of the live comparison with transformers."""

import functools
import pathlib
import secrets
import subprocess
from collections.abc import Callable, Sequence

import pytest

from tests.models.answers import Answers, load_answers
from tests.models.parity import GOLDENS
from tools.oracle.golden import Golden, load


@pytest.fixture(scope="session")
def live_golden(
    request: pytest.FixtureRequest,
    repo: pathlib.Path,
    oracle_python: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Golden]:
    """Return fresh golden records by name. One oracle run covers all selected cases."""
    folder, seed = tmp_path_factory.mktemp("live"), request.config.getoption("--oracle-seed")
    command = [oracle_python, "-m", "tools.oracle", "make", "--out", folder, "--seed"]
    fresh = secrets.randbelow(2**31) if seed is None else seed
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    left = [item.callspec.params["name"] for item in items if "live_golden" in item.fixturenames]
    failed: dict[str, str] = {}
    while left:  # restart after a case that crashes the oracle
        asked = _asked([*command, fresh, *(f"--case={name}" for name in left)], repo)
        print(asked.stdout)
        left = [name for name in left if not (folder / name).exists()]
        if left:  # the first one crashed, or no seed gave it clear margins: that of its record does
            name = left.pop(0)
            again = _asked([*command, load(GOLDENS / name).seed, f"--case={name}"], repo)
            if not (folder / name).exists():
                failed[name] = asked.stderr[-2000:] + again.stderr[-2000:]

    def of(name: str) -> Golden:
        assert name not in failed, failed[name]
        return load(folder / name)

    return of


@pytest.fixture(scope="session")
def live_answers(
    repo: pathlib.Path, oracle_python: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Answers]:
    """Return the answers of the installed transformers to a module of `tools.oracle`, which runs once."""

    @functools.cache
    def answers(module: str) -> Answers:
        path = tmp_path_factory.mktemp("answers") / f"{module}.json.gz"
        asked = _asked([oracle_python, "-m", f"tools.oracle.{module}", path], repo)
        assert asked.returncode == 0, asked.stderr
        return load_answers(path)

    return answers


def _asked(command: Sequence[object], repo: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=repo, capture_output=True, text=True)
