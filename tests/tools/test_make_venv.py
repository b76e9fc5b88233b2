"""tools/make_venv.sh on a fake machine: no network, no real environment."""

import os
import pathlib
import shutil
import subprocess
import textwrap

import pytest

TOOLS = ("sh", "mkdir", "rmdir", "rm", "cp", "touch", "dirname", "cat")

# Answers the script's calls of Python: version and modules (-c), its name, `-m venv --clear DIR`, `-m pip`.
FAKE = """\
    #!/bin/sh
    echo "$(basename "$0") $*" >>"$LOG"
    case "$1 $2" in
        -c*version_info*) exit {too_old} ;;
        -c*ensurepip*) exit {no_ensurepip} ;;
        "--version "*) echo Python 3.12.9 ;;
        "-m venv") rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
        "-m pip") case "$*" in *install*) exit "${{PIP_FAILS:-0}}" ;; esac ;;
    esac
"""


class Machine:
    """A PATH with a few commands and fake Pythons, and a log of their calls."""

    def __init__(self, root: pathlib.Path, script: pathlib.Path) -> None:
        self.bin, self.log, self.work, self.script = root / "bin", root / "log", root / "work", script
        self.venv = self.work / ".venv"
        self.bin.mkdir()
        self.work.mkdir()
        for tool in (*TOOLS, "basename"):
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)

    def python(self, path: str, too_old: int = 0, no_ensurepip: int = 0) -> pathlib.Path:
        file = self.bin / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(FAKE).format(too_old=too_old, no_ensurepip=no_ensurepip))
        file.chmod(0o755)
        return file

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        env = {"PATH": str(self.bin), "HOME": str(self.work), "LOG": str(self.log), **env}
        command = [shutil.which("sh") or "sh", str(self.script), ".venv", ".[test]"]
        return subprocess.run(command, cwd=self.work, env=env, capture_output=True, text=True, check=False)

    def asked(self, what: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if what in line]


@pytest.fixture
def machine(tmp_path: pathlib.Path, repo: pathlib.Path) -> Machine:
    if os.name != "posix":
        pytest.skip("the script is for POSIX shells")
    return Machine(tmp_path, repo / "tools" / "make_venv.sh")


def test_takes_the_first_new_enough(machine: Machine) -> None:
    machine.python("python3.12", too_old=1)
    machine.python("python3.13")
    machine.python("python3")
    assert machine.run().returncode == 0
    assert machine.asked("venv --clear") == ["python3.13 -m venv --clear .venv"]
    assert machine.asked("install") == [
        "python -m pip install --quiet --disable-pip-version-check --editable .[test]",
    ]


def test_says_so_when_there_is_none(machine: Machine) -> None:
    machine.python("python3", too_old=1)
    done = machine.run()
    assert done.returncode == 1
    assert "needs Python >= 3.12 and found none" in done.stderr
    assert not machine.venv.exists()


def test_says_so_when_venv_is_missing(machine: Machine) -> None:
    machine.python("python3.12", no_ensurepip=1)
    done = machine.run()
    assert done.returncode == 1
    assert "python3.12 cannot make virtual environments" in done.stderr


def test_goes_on_to_a_python_that_can_make_environments(machine: Machine) -> None:
    machine.python("python3.12", no_ensurepip=1)
    machine.python("python3.13")
    assert machine.run().returncode == 0
    assert machine.asked("venv --clear") == ["python3.13 -m venv --clear .venv"]


def test_finds_a_pyenv_version_that_is_not_on_the_path(machine: Machine) -> None:
    machine.python("pyenv/versions/3.13.0/bin/python")
    assert machine.run(PYENV_ROOT=str(machine.bin / "pyenv")).returncode == 0
    assert machine.asked("venv --clear")


def test_python_variable_wins_or_is_refused(machine: Machine) -> None:
    machine.python("python3.12")
    chosen, old = machine.python("mine/chosen"), machine.python("mine/old", too_old=1)
    assert machine.run(PYTHON=str(chosen)).returncode == 0
    assert machine.asked("venv --clear") == ["chosen -m venv --clear .venv"]
    shutil.rmtree(machine.venv)
    done = machine.run(PYTHON=str(old))
    assert done.returncode == 1
    assert f"PYTHON={old} is not a Python >= 3.12" in done.stderr


def test_a_sound_environment_is_kept(machine: Machine) -> None:
    machine.python("python3.12")
    machine.run()
    (machine.venv / "mine").touch()
    assert machine.run().returncode == 0
    assert machine.asked("venv --clear") == []
    assert (machine.venv / "mine").exists()


def test_an_installation_cut_off_does_not_poison_the_next_run(machine: Machine) -> None:
    machine.python("python3.12")
    assert machine.run(PIP_FAILS="137").returncode == 137
    assert machine.run().returncode == 0
    assert machine.asked("venv --clear") == ["python3.12 -m venv --clear .venv"]
    assert machine.run().returncode == 0
    assert machine.asked("venv --clear") == []


def test_a_failed_installation_is_reported_and_tried_again(machine: Machine) -> None:
    machine.python("python3.12")
    assert machine.run(PIP_FAILS="1").returncode == 1
    assert machine.run().returncode == 0
    assert machine.asked("venv --clear") == []


def test_an_environment_without_its_python_is_made_anew(machine: Machine) -> None:
    machine.python("python3.12")
    machine.run()
    (machine.venv / "bin" / "python").unlink()
    assert machine.run().returncode == 0
    assert machine.asked("venv --clear") == ["python3.12 -m venv --clear .venv"]
