"""Child processes that hang, crash or exit, and their journals; small ones, without JAX."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from pallas_kernels import supervise as module
from pallas_kernels.supervise import Ended, Journal, supervise

CHILD = """
import os, pathlib, sys, time
from pallas_kernels.supervise import Journal
journal, known = Journal(pathlib.Path(sys.argv[1])), Journal(pathlib.Path(sys.argv[1])).progress()
for step in "one", "two", "three":
    if step not in known.ended | known.condemned.keys():
        with journal.step(step):
            exec(dict(zip(("one", "two", "three"), sys.argv[2:]))[step])
"""


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal")


def run(journal, *steps, children=None, **options):
    def start(left, alone):
        if children is not None:
            children.append((left, alone))
        command = [sys.executable, "-c", CHILD, str(journal.path), *steps, *["pass"] * (3 - len(steps))]
        return subprocess.Popen(command, start_new_session=True)

    return supervise(start, journal, **{"seconds": 600.0, "patience": 3.0, **options})


def test_a_step_in_which_children_hang_or_die_is_condemned_and_the_others_end(journal):
    told, children = [], []
    ended = run(
        journal,
        "time.sleep(99)",
        "os.abort()",
        children=children,
        condemn=lambda name, ended: told.append((name, ended)),
    )
    assert ended == Ended("", 0)
    progress = journal.progress()
    assert progress.ended == {"three"}
    assert progress.condemned == {
        "one": "it hung: nothing came for 3 s",
        "two": "it ended the process: signal SIGABRT",
    }
    assert told == [("one", Ended("nothing came for 3 s", None)), ("two", Ended("signal SIGABRT", -signal.SIGABRT))]
    assert [alone for _, alone in children] == [False] * 3
    assert 600 > children[0][0] > children[1][0] > children[2][0]


def test_a_child_that_gets_nowhere_is_the_last(journal):
    children = []
    ended = supervise(
        lambda left, alone: (
            children.append(left) or subprocess.Popen([sys.executable, "-c", "exit(5)"], start_new_session=True)
        ),
        journal,
        seconds=60.0,
        patience=5.0,
    )
    assert (ended, len(children)) == (Ended("exit 5", 5), 1)


def test_a_final_exit_status_is_not_tried_again(journal):
    assert run(journal, "pass", "sys.exit(3)", final=(0, 3)) == Ended("", 3)
    assert journal.progress().condemned == {}


def test_before_the_first_step_there_is_more_patience(journal, monkeypatch):
    monkeypatch.setattr(module, "START_S", 3.0)
    begun = time.monotonic()
    ended = supervise(
        lambda *_: subprocess.Popen(["sleep", "99"], start_new_session=True), journal, seconds=60.0, patience=0.5
    )
    assert ended == Ended("nothing came for 3 s", None)
    assert 3.0 <= time.monotonic() - begun < 30


def test_children_of_a_child_end_with_it(journal):
    grandchild = "import subprocess; p = subprocess.Popen(['sleep', '987654']); journal.put(pid=p.pid); time.sleep(99)"
    run(journal, grandchild)
    (pid,) = (line["pid"] for line in journal.lines() if "pid" in line)
    stat = pathlib.Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(") ")[2].startswith("Z")


def test_a_torn_line_costs_itself_alone(journal):
    journal.put(key="one")
    with journal.path.open("a") as file:
        file.write('{"key": "tw')
    journal.put(key="three")
    assert [line["key"] for line in journal.lines()] == ["one", "three"]


def test_the_innermost_step_of_each_thread_runs(journal):
    for line in (
        {"began": "lost", "thread": 1},
        {"child": True},
        {"began": "outer", "thread": 1},
        {"began": "inner", "thread": 1},
        {"began": "other", "thread": 2},
        {"began": "failed inside", "thread": 3},
        {"began": "deeper", "thread": 3},
        {"ended": "failed inside", "thread": 3},
    ):
        journal.put(**line)
    assert journal.progress().running == ("inner", "other")
    assert journal.progress().ended == {"failed inside"}
    with journal.step("mine"):
        assert "mine" in journal.progress().running


def test_a_step_that_an_exception_leaves_has_no_end(journal):
    with pytest.raises(ValueError, match="no"), journal.step("one"):
        raise ValueError("no")
    assert (journal.progress().running, journal.progress().ended) == (("one",), frozenset())
