"""Tests that the programs of the other fleet tests are installed."""

import pathlib
import subprocess

import pytest


@pytest.mark.parametrize("program", ["envoy", "smg", "ray"])
def test_a_program_says_its_version(programs: pathlib.Path, program: str) -> None:
    assert subprocess.run([programs / program, "--version"], capture_output=True, timeout=120).returncode == 0


def test_haproxy_says_its_version(haproxy: pathlib.Path) -> None:
    assert b"2.8" in subprocess.run([haproxy, "-v"], capture_output=True, timeout=120).stdout
