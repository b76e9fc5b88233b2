"""benchmarks/host_cost.py: its arithmetic by hand, and the command on a few steps."""

import gc
import json
import pathlib

import pytest

from benchmarks import host_cost
from benchmarks.traces import cost


def row(sequences: int, waiting: int, median: float, p99: float = 0.002) -> dict:
    spread = {"median": median, "p99": p99, "max": p99}
    times = dict.fromkeys(("plan", "commit", "step", "cpu"), spread)
    return {"sequences": sequences, "waiting": waiting, **times, "gc": {"collections": 0, "longest": 0.0}}


def test_growth_is_the_exponent() -> None:
    assert cost.growth([row(n, 0, 3e-6 * n) for n in (32, 64, 512)]) == pytest.approx(1.0)
    assert cost.growth([row(n, 0, 3e-6 * n**2) for n in (32, 512)]) == pytest.approx(2.0)
    assert cost.growth([row(32, 0, 1e-3)]) is None


def test_verdicts() -> None:
    rows = [row(128, 0, 0.4e-3), row(256, 0, 0.8e-3), row(128, 10_000, 0.6e-3), row(256, 10_000, 1.2e-3, p99=0.004)]
    found = {name: item["reached"] for name, item in cost.verdicts(rows).items()}
    assert found == {
        "256 running, 0 waiting: median": True,
        "256 running, 0 waiting: p99": True,
        "256 running, 10000 waiting: median": False,
        "256 running, 10000 waiting: p99": False,
        "0 waiting: growth exponent": True,
        "10000 waiting: growth exponent": True,
        "10000 over 0 waiting": False,
    }
    assert cost.verdicts([row(32, 0, 1e-3)]) == {}


def test_the_load_is_steady() -> None:
    load = cost.Load(8, 20)
    server = cost.without_device(load)
    steady = cost.Steady(load, server)
    for _ in range(50):
        steady.step()
        scheduler = server.scheduler
        assert (scheduler.running, sum(scheduler.waiting.values())) in [(8, 20), (7, 20), (8, 19), (7, 21), (8, 18)]
    lengths = {len(sequence.tokens) for sequence in server.scheduler._running.values()}
    assert len(lengths) > 4


def test_collections_are_seen() -> None:
    with cost.watched_gc() as pauses:
        gc.collect()
    assert pauses.count == 1
    assert 0 < pauses.longest < 60
    assert pauses.note not in gc.callbacks


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--sequences", "4,8", "--waiting", "0,5", "--steps", "20", "--out", str(out)]
    assert host_cost.main(arguments) == 0
    result = json.loads(out.read_text())
    assert [(item["sequences"], item["waiting"]) for item in result["rows"]] == [(4, 0), (8, 0), (4, 5), (8, 5)]
    assert all(0 < item["plan"]["median"] < item["step"]["median"] for item in result["rows"])
    assert set(result["verdicts"]) == {"0 waiting: growth exponent", "5 waiting: growth exponent", "5 over 0 waiting"}
    printed = capsys.readouterr().out.splitlines()
    assert len({line.count("|") for line in printed[:6]}) == 1
    assert printed[2].startswith("| 4 | 0 | ")


@pytest.mark.slow
def test_the_runner_with_programs_that_do_nothing(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--sequences", "4", "--waiting", "0", "--steps", "20", "--runner", "--out", str(out)]
    assert host_cost.main(arguments) == 0
    found = json.loads(out.read_text())["runner"]
    assert found["sequences"] == 256
    assert 0 < found["launch"]["median"] < found["runner"]["median"]
