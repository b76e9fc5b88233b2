"""Tests of the command `jaxinfer`: its help, its errors, and that neither imports jax."""

import json
import pathlib
import subprocess
import sys
import tomllib

import pytest

import jaxinfer
from jaxinfer.cli.app import COMMANDS, main

LIGHT = [
    ["--help"],
    ["--version"],
    ["version"],
    ["servee"],
    *([name, "--help"] for name in COMMANDS),
    *([name, "--no-such-flag"] for name in COMMANDS),
    ["serve", "demo", "--page-size", "3"],
    ["generate", "--page-size", "3"],
]
# One process for all commands: a heavy import would stay loaded.
PROBE = """
import contextlib, io, json, sys
from jaxinfer.cli.app import main
found = {}
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    heavy = [name for name in ("jax", "fastapi", "orbax") if name in sys.modules]
    found[" ".join(words)] = [code, out.getvalue(), err.getvalue(), heavy]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, list]:
    done = subprocess.run([sys.executable, "-c", PROBE, json.dumps(LIGHT)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", LIGHT, ids=" ".join)
def test_help_and_errors_wait_for_nothing_heavy(answers, words):
    assert answers[" ".join(words)][3] == []


def test_commands_are_listed_with_a_line_each(answers):
    code, out, _, _ = answers["--help"]
    assert code == 0
    for name, command in COMMANDS.items():
        assert any(line.split() == [name, *command.summary.split()] for line in out.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen_and_begins_with_how_to_call_it(answers, name):
    code, out, _, _ = answers[f"{name} --help"]
    assert code == 0
    assert out.startswith(f"usage: jaxinfer {name}")
    assert len(out.splitlines()) <= 45
    assert "_MISSING_TYPE" not in out


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_flag_is_one_line(answers, name):
    code, out, err, _ = answers[f"{name} --no-such-flag"]
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")


def test_a_setting_that_cannot_be_is_told_before_anything_is_imported(answers):
    assert answers["serve demo --page-size 3"][::2][:2] == [2, "error: engine.page_size = 3 must be a power of two\n"]
    assert answers["generate --page-size 3"][::2][:2] == [2, "error: page_size = 3 must be a power of two\n"]


def test_a_wrong_command_is_told_the_nearest(answers):
    assert answers["servee"][0] == 2
    assert "did you mean serve?" in answers["servee"][2]


@pytest.mark.parametrize("words", [["--version"], *([name, "--version"] for name in COMMANDS)], ids=" ".join)
def test_every_command_knows_the_version(words, capsys):
    assert main(words) == 0
    assert capsys.readouterr().out == f"jaxinfer {jaxinfer.__version__}\n"


def test_the_version_stands_in_one_place(repo: pathlib.Path, answers):
    project = tomllib.loads((repo / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "jaxinfer.version.__version__"
    assert project["project"]["scripts"]["jaxinfer"] == "jaxinfer.cli.app:main"
    assert answers["version"][1].startswith(f"jaxinfer {jaxinfer.__version__}\nPython ")


def test_a_module_is_the_same_command(repo: pathlib.Path):
    """`python -m jaxinfer` is the same command as the console script, which calls the same function."""
    done = subprocess.run([sys.executable, "-m", "jaxinfer", "version"], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("jaxinfer ")
