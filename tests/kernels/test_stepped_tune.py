"""The tuner's processes: candidates that hang or crash are skipped, and earlier results are kept."""

import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from pallas_kernels.supervise import Journal
from pallas_kernels.tune import __main__ as door
from pallas_kernels.tune.steps import SteppedBench
from tests.kernels.test_tune import BEST, GRID, TIMES, Clock, FakeBench, Tiles, sweep

ROOT = pathlib.Path(__file__).parents[2]
SOME = Tiles(128, 3)


@pytest.fixture
def environment(monkeypatch, tmp_path):
    def given(plan):
        for name, value in {
            "STAND_IN_PLAN": json.dumps(plan),
            "STAND_IN_LOG": str(tmp_path / "log"),
            "PYTHONPATH": str(ROOT),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(
            door, "COMMAND", (sys.executable, str(pathlib.Path(__file__).with_name("tune_stand_in.py")))
        )

    return given


@pytest.fixture
def tune(environment, tmp_path, monkeypatch):
    """Return a function that tunes two shapes, 16 rows and 1 row; it returns exit status and tiles by rows."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(plan, *more):
        environment(plan)
        code = door.main(["--seconds", "600", "--patience", "4", "--out", str(tmp_path / "out.json"), *more])
        return code, found(tmp_path)

    return run


def found(folder):
    path = folder / "out.json"
    entries = json.loads(path.read_text())["entries"] if path.exists() else []
    return {
        one["sizes"]["rows"]: (entry["bits"] | one["tiles"], one["facts"])
        for entry in entries
        for one in entry["measured"]
    }


def taken(folder):
    return (folder / "log").read_text().splitlines()


def test_candidates_that_hang_or_die_are_left_out(tune, tmp_path, capfd):
    plan = {"16, 128, 4": "hangs", "16, 64, 3": "kills itself", "16, 64, 4": "is refused", "1, sample 128, 4": "hangs"}
    code, results = tune(plan)
    assert code == 0
    assert {rows: tiles for rows, (tiles, _) in results.items()} == {
        16: dataclasses.asdict(SOME),
        1: dataclasses.asdict(SOME),
    }
    assert results[16][1]["tried"] == 6
    said = capfd.readouterr().out
    assert "keys=128, stages=4): it hung" in said
    assert "keys=64, stages=3): it ended the process: signal SIGSEGV" in said
    steps = taken(tmp_path)
    assert [steps.count(name) for name in plan] == [1, 1, 1, 1]
    assert steps.count("16, 128, 2") <= 2  # prepared again only for the race


def test_a_first_candidate_that_hangs_fails_its_shape_alone(tune):
    code, results = tune({"16, 64, 2": "hangs"})
    assert code == 1
    assert {rows: tiles for rows, (tiles, _) in results.items()} == {1: {"keys": 128, "stages": 4}}


def test_operands_that_kill_the_process_fail_their_shape_alone(tune, capfd):
    code, results = tune({"16, operands": "kills itself"})
    assert (code, list(results)) == (1, [1])
    assert "failed: it ended the process: signal SIGSEGV" in capfd.readouterr().out


def test_what_was_measured_before_is_forgotten_once(tune, tmp_path):
    """``--anew`` drops old measurements once; the process restarted after a hang keeps the new ones."""
    tune({})
    code, results = tune({"16, 128, 4": "is refused", "1, 128, 2": "hangs"}, "--anew")
    assert code == 1
    assert {rows: tiles for rows, (tiles, _) in results.items()} == {16: dataclasses.asdict(SOME)}


def test_where_nothing_runs_the_status_says_so(tune):
    assert tune({"16, 64, 2": "hangs", "1, 64, 2": "kills itself"}) == (4, {})


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_signals_keep_what_was_found(environment, tmp_path, stop):
    environment({"16, sample 128, 3": "is slow"})
    parent = (
        "import os, sys, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pallas_kernels.tune import __main__ as door; door.COMMAND = (sys.executable, sys.argv[1])\n"
        "sys.exit(door.main(sys.argv[2:]))"
    )
    given = ["--seconds", "100", "--patience", "50", "--out", str(tmp_path / "out.json")]
    command = [sys.executable, "-c", parent, door.COMMAND[1], *given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "log").exists() or "16, sample 128, 3" not in taken(tmp_path):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, stop)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in said
    assert list(found(tmp_path)) == [16]


def test_what_an_earlier_process_found_is_not_found_again(tmp_path):
    def bench():
        return FakeBench(Clock(), TIMES, wrong={SOME: "its result is 1.0 off"})

    journal, first = Journal(tmp_path / "journal"), bench()
    assert sweep(SteppedBenchOf(first, journal)).run() == BEST
    journal.put(condemned=f"task: {BEST}", why="it hung: nothing came for 2 s")
    second = bench()
    search = sweep(SteppedBenchOf(second, journal))
    assert search.run() == Tiles(128, 2)
    assert second.prepared == [GRID[0]]
    assert second.sampled == []
    assert search.refused == {SOME: "its result is 1.0 off", BEST: "it hung: nothing came for 2 s"}
    again = SteppedBenchOf(second, journal)
    assert [again.prepare(tiles) for tiles in GRID[:2]] == [None, None]
    while second.sampled == []:
        assert again.sample(GRID[1]) == TIMES[GRID[1]]
    assert second.prepared[-1] == GRID[1]  # prepared at its first new sample


def test_what_is_refused_when_it_is_prepared_again_does_not_win(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.put(sampled=f"task: {BEST}", microseconds=1.0)
    bench = SteppedBenchOf(FakeBench(Clock(), TIMES, wrong={BEST: "no"}), journal)
    assert (bench.prepare(GRID[0]), bench.prepare(BEST), bench.sample(BEST)) == (None, None, 1.0)
    assert bench.sample(BEST) == math.inf


class SteppedBenchOf(SteppedBench):
    def __init__(self, bench, journal):
        super().__init__(bench, "task", journal)
        self.clock = bench.clock
