"""Eight devices on a CPU, in a process of their own: the others keep the one that they are used to."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.parallel.devices.conftest import FORCED


def run(repo: pathlib.Path, *options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/parallel/devices", *options]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FORCED}"
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, env={**os.environ, "XLA_FLAGS": flags})
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_on_eight_devices(repo: pathlib.Path) -> None:
    run(repo)


@pytest.mark.slow
def test_long_runs_on_eight_devices(repo: pathlib.Path) -> None:
    run(repo, "-m", "slow")
