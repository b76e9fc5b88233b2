"""Sections in real processes whose steps hang, crash or poison the device: the records of all other steps remain."""

import json
import pathlib
import sys
import time

import pytest

from jaxinfer.gpu_check import __main__ as gpu_check
from jaxinfer.gpu_check.report import Report, read_records
from jaxinfer.gpu_check.sections import Section

STAND_IN = pathlib.Path(__file__).with_name("stand_in.py")


@pytest.fixture
def section(monkeypatch, tmp_path):
    """Return a function that runs section copy with given steps; it returns the section and its records by key."""

    def run(steps, seconds=600.0, patience=4.0, threads=1):
        monkeypatch.setitem(
            gpu_check.BY_NAME, "copy", Section("copy", "jaxinfer.gpu_check.stand_in", seconds, patience)
        )
        monkeypatch.setattr(gpu_check, "QUICK_PATIENCE", 1)
        monkeypatch.setattr(gpu_check, "COMMAND", (sys.executable, str(STAND_IN)))
        monkeypatch.setenv("STAND_IN_STEPS", json.dumps(steps))
        monkeypatch.setenv("STAND_IN_THREADS", str(threads))
        monkeypatch.setenv("PYTHONPATH", str(gpu_check.ROOT))
        found = gpu_check.run_section("copy", True, {}, tmp_path / "part")
        return found, {record["key"]: record for record in found["records"]}

    return run


def test_the_steps_beside_those_that_hang_or_die_are_there(section):
    steps = {"one": 0, "two": "hangs", "three": 0, "four": "kills itself", "five": "hangs", "six": "fails", "seven": 0}
    found, records = section(steps)
    assert found["status"] == "ok"
    assert list(records) == list(steps)
    assert [records[step]["ok"] for step in ("one", "three", "seven")] == [True] * 3
    assert [step for step, record in records.items() if record.get("hung")] == ["two", "five"]
    assert "SIGSEGV" in records["four"]["error"]
    assert [records[step]["ok"] for step in ("two", "four", "five")] == [False] * 3
    assert records["six"] == {"key": "six", "error": "RuntimeError: no room"}
    assert len({records[step]["process"] for step in ("one", "three", "seven")}) == 3


def test_of_several_at_once_the_one_that_hangs_alone_is_named(section):
    steps = {"one": 0, "two": "hangs", "three": 1.0, "four": 0, "five": 0}
    found, records = section(steps, threads=4, patience=4.0)
    assert found["status"] == "ok"
    assert [step for step, record in records.items() if record.get("hung")] == ["two"]
    assert all(records[step]["ok"] for step in steps if step != "two")
    found, records = section({"one": "hangs", "two": "hangs", "three": 0, "four": 0}, threads=2)
    assert {step for step, record in records.items() if record.get("hung")} == {"one", "two"}
    assert records["three"]["alone"]
    assert records["four"]["ok"]


def test_a_device_that_is_unusable_fails_one_step_and_not_those_behind(section):
    found, records = section({"one": 0, "two": "poisons", "three": 0, "four": 0})
    assert (found["status"], records["two"]["ok"]) == ("ok", False)
    assert "ILLEGAL_ADDRESS" in records["two"]["error"]
    assert records["three"]["ok"]
    assert records["four"]["ok"]
    assert records["one"]["process"] != records["three"]["process"] == records["four"]["process"]


def test_of_several_at_once_the_one_that_poisons_the_device_is_named(section):
    _, records = section({"one": 5, "two": "poisons", "three": 0, "four": 0}, threads=4, patience=10.0)
    assert [step for step, record in records.items() if not record["ok"]] == ["two"]
    assert records["one"]["alone"]


def test_the_limit_holds_and_what_ran_then_is_named(section):
    start = time.monotonic()
    found, records = section({"one": "hangs", "two": 0}, seconds=8.0, patience=30.0)
    assert time.monotonic() - start < 8.0 + 20
    assert found["status"] == "stopped after 8 s"
    assert list(records) == ["one"]
    assert "error" in records["one"]
    assert "hung" not in records["one"]


def test_another_process_has_the_time_that_is_left(section):
    found, records = section({"one": "hangs", "two": "hangs", "three": 0}, seconds=9.0, patience=3.0)
    assert found["seconds"] < 9.0 + 20
    assert records["one"]["hung"]
    assert {"not run: two", "not run: three"} < set(records)


def test_a_step_longer_than_the_patience_is_none_that_hangs_if_it_says_so(section):
    _, records = section({"one": "goes on", "two": 30.0}, patience=4.0)
    assert records["one"]["ok"]
    assert records["two"]["hung"]


def test_what_is_no_steps_fault_ends_the_section(section):
    found, records = section(["no steps"])
    assert found["status"] == "failed (exit 1)"
    assert "AttributeError" in found["stderr"]
    assert records == {}


def test_temporary_files_of_processes_that_are_killed_are_removed(section):
    _, records = section({"one": 0, "two": "hangs"})
    assert not pathlib.Path(records["one"]["temporary"]).exists()


def test_the_exit_status_tells_a_hang(section, tmp_path, capsys):
    found, _ = section({"one": 0, "two": "hangs"})
    results = gpu_check.Results(tmp_path, {"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu"}, quick=False)
    results.put("copy", found)
    assert gpu_check.summary(results, ["copy"]) == 1
    assert "WRONG: two" in capsys.readouterr().out
    assert "| two | " not in results.path.with_suffix(".md").read_text()
    assert "- two: it hung" in results.path.with_suffix(".md").read_text()


def test_a_report_leaves_out_what_was_done(tmp_path):
    def report():
        return Report(tmp_path / "records", seconds=60, quick=True, limits={})

    first = report()
    with first.attempt("outer"):
        with first.attempt("one"):
            first.put("one", ok=True)
        first._journal.put(condemned="two", why="it hung")
        again = report()
        assert [again.wanted(step) for step in ("outer", "one", "two", "three")] == [True, False, False, True]
        assert [again.wanted(step, anew=True) for step in ("one", "two")] == [True, False]
        assert [again.time_for(step, 0) for step in ("one", "three")] == [False, True]
    assert not report().wanted("outer")
    assert read_records(tmp_path / "records") == [{"key": "one", "ok": True}]
