"""The live comparison with transformers."""

import functools
import pathlib
import secrets
import subprocess
from collections.abc import Callable, Sequence

import pytest

from tests.models.answers import Answers, load_answers
from tools.oracle.golden import Golden, load


@pytest.fixture(scope="session")
def live_golden(
    request: pytest.FixtureRequest,
    repo: pathlib.Path,
    oracle_python: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Golden]:
    """Fresh golden records by name. The oracle is asked once, for all the cases that this run has selected."""
    folder, seed = tmp_path_factory.mktemp("live"), request.config.getoption("--oracle-seed")
    command = [oracle_python, "-m", "tools.oracle", "make", "--out", folder]
    command += ["--seed", secrets.randbelow(2**31) if seed is None else seed]
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "live_golden" in item.fixturenames:
            command += ["--case", item.callspec.params["name"]]
    print(_run(command, repo))
    return lambda name: load(folder / name)


@pytest.fixture(scope="session")
def live_answers(
    repo: pathlib.Path, oracle_python: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Answers]:
    """What the transformers that is there answers to a module of `tools.oracle`, which is asked once."""

    @functools.cache
    def answers(module: str) -> Answers:
        path = tmp_path_factory.mktemp("answers") / f"{module}.json.gz"
        _run([oracle_python, "-m", f"tools.oracle.{module}", path], repo)
        return load_answers(path)

    return answers


def _run(command: Sequence[object], repo: pathlib.Path) -> str:
    asked = subprocess.run([str(word) for word in command], cwd=repo, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout
