"""The live comparison with transformers. Its options exist in runs that name this folder: ``pytest tests/models``."""

import pathlib
import secrets
import subprocess
from collections.abc import Callable

import pytest

from tools.oracle.golden import Golden, load


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity")
    group.addoption(
        "--oracle-python", help="interpreter with torch and transformers (default: .venv-oracle, made here)"
    )
    group.addoption("--oracle-seed", type=int, help="first seed of the live comparison (default: a fresh one)")


@pytest.fixture(scope="session")
def oracle_python(request: pytest.FixtureRequest, repo: pathlib.Path) -> pathlib.Path:
    """The oracle's interpreter; its environment is made if need be. Skips where no Python for it can be found."""
    named = request.config.getoption("--oracle-python", None)
    if named is not None:
        return pathlib.Path(named).absolute()
    made = subprocess.run(
        [repo / "tools/oracle/make_venv.sh", ".venv-oracle"], cwd=repo, capture_output=True, text=True
    )
    if made.returncode == 3:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    return repo / ".venv-oracle/bin/python"


@pytest.fixture(scope="session")
def live_golden(
    request: pytest.FixtureRequest,
    repo: pathlib.Path,
    oracle_python: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Golden]:
    """Fresh golden records by name. The oracle is asked once, for all the cases that this run has selected."""
    folder, seed = tmp_path_factory.mktemp("live"), request.config.getoption("--oracle-seed", None)
    command = [oracle_python, "-m", "tools.oracle", "make", "--out", folder]
    command += ["--seed", secrets.randbelow(2**31) if seed is None else seed]
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "live_golden" in item.fixturenames:
            command += ["--case", item.callspec.params["name"]]
    asked = subprocess.run([str(word) for word in command], cwd=repo, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    print(asked.stdout)
    return lambda name: load(folder / name)
