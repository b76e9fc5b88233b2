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
from tools.oracle.images_golden import ImageGolden, read_images

IMAGES = GOLDENS.parent / "images"


@pytest.fixture(scope="session")
def live_golden(
    request: pytest.FixtureRequest,
    repo: pathlib.Path,
    oracle_python: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Golden]:
    """Return fresh golden records by name. One oracle run covers all selected cases."""
    folder = tmp_path_factory.mktemp("live")
    command = [oracle_python, "-m", "tools.oracle", "make", "--out", folder]
    names = _asked_for("live_golden", request.session)
    failed = _made(command, folder, names, lambda name: load(GOLDENS / name).seed, repo, request.config)
    return functools.partial(_read, load, folder, failed)


@pytest.fixture(scope="session")
def live_images(
    request: pytest.FixtureRequest,
    repo: pathlib.Path,
    oracle_python: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], ImageGolden]:
    """Return fresh records of models with images by name, as `live_golden` does."""
    folder = tmp_path_factory.mktemp("live_images")
    command = [oracle_python, "-m", "tools.oracle.images_towers", "make", folder]
    names = _asked_for("live_images", request.session)
    failed = _made(command, folder, names, lambda name: read_images(IMAGES / name).seed, repo, request.config)
    return functools.partial(_read, read_images, folder, failed)


def _read[T](load: Callable[[pathlib.Path], T], folder: pathlib.Path, failed: dict[str, str], name: str) -> T:
    """Read a fresh record; fail if it could not be made."""
    assert name not in failed, failed[name]
    return load(folder / name)


def _asked_for(fixture: str, session: pytest.Session) -> list[str]:
    """Return the names of the cases of the selected tests that use a fixture."""
    items = (item for item in session.items if isinstance(item, pytest.Function))
    return [item.callspec.params["name"] for item in items if fixture in item.fixturenames]


def _made(
    command: Sequence[object],
    folder: pathlib.Path,
    names: list[str],
    recorded: Callable[[str], int],
    repo: pathlib.Path,
    config: pytest.Config,
) -> dict[str, str]:
    """Make fresh records in a folder; return the errors of those that failed, by name.

    Args:
        recorded: returns the seed of a committed record.
    """
    seed, left, failed = config.getoption("--oracle-seed"), names, dict[str, str]()
    fresh = secrets.randbelow(2**31) if seed is None else seed
    while left:  # restart after a case that crashes the oracle
        asked = _asked([*command, "--seed", fresh, *(f"--case={name}" for name in left)], repo)
        print(asked.stdout)
        left = [name for name in left if not (folder / name).exists()]
        if left:  # the first one crashed, or no seed gave it clear margins: that of its record does
            name = left.pop(0)
            again = _asked([*command, "--seed", recorded(name), f"--case={name}"], repo)
            if not (folder / name).exists():
                failed[name] = asked.stderr[-2000:] + again.stderr[-2000:]
    return failed


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
