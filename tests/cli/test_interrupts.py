"""Tests of Ctrl-C at a terminal: it works while modules are imported, and the cursor is restored."""

import errno
import pathlib
import signal
import subprocess
import sys

import pytest

from jaxinfer.cli.interrupts import until_cut_off
from tests.terminal.pseudo import CTRL_C, terminal

# Imports may swallow exceptions: in a callback, in a C extension, in a broad except.
IMPORTING = """
import dataclasses, sys, time, types
from jaxinfer.cli import app

class Swallowing:
    def find_spec(self, name, path=None, target=None):
        if name != "slow_to_import":
            return None
        print("\\x1b[?25limporting", file=sys.stderr, flush=True)
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                print("swallowed", file=sys.stderr, flush=True)

sys.meta_path.insert(0, Swallowing())
app.COMMANDS["version"] = dataclasses.replace(app.COMMANDS["version"], work="slow_to_import")
sys.exit(app.main(["version"]))
"""
WORKING = """
import sys, time
from jaxinfer.cli import app, version

def run(args):
    print("\\x1b[?25lworking", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.01)

version.run = run
sys.exit(app.main(["version"]))
"""


@pytest.mark.parametrize(("program", "words"), [(IMPORTING, "importing"), (WORKING, "working")])
def test_ctrl_c_ends_with_130_the_cursor_and_no_traceback(program, words):
    with terminal("-c", program) as at:
        at.until(words)
        at.type(CTRL_C)
        assert at.wait() == 130
        assert at.text.rindex("\x1b[?25h") > at.text.rindex("\x1b[?25l")
        assert at.text.endswith("\n")
        assert "Traceback" not in at.text
        assert "swallowed" not in at.text


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["serve", "--help-all"], ["version"]])
def test_whoever_stops_reading_is_shown_no_traceback(words: list[str]) -> None:
    code = "import sys; from jaxinfer.cli import app; input(); sys.exit(app.main(sys.argv[1:]))"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, said = process.communicate(b"\n")
    assert (process.returncode, said) == (128 + signal.SIGPIPE, b"")


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "jaxinfer", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    said = b"error: what was to be written has no room: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_other_errors_of_the_system_are_nobodys_output() -> None:
    def work() -> int:
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        until_cut_off(work)
