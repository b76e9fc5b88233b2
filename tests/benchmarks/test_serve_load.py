"""benchmarks/serve_load.py: its arithmetic by hand, its engine, and the command on a small load."""

import json
import pathlib
import time

import numpy as np
import pytest

from benchmarks import serve_load
from benchmarks.serving import clients, load, report
from benchmarks.serving.paced import Pace, PacedEngine, Stamps, id_of
from jaxinfer.config import EngineConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import FinishReason, Request


def heard(row: int, times: list[float], counts: list[int], **more: object) -> clients.Heard:
    return clients.Heard(row, 0.0, times, counts, **more)


def test_delays_are_of_tokens_that_left_in_the_window() -> None:
    stamps = np.asarray([[1.0, 2.0, 3.0, 4.0], [2.5, 3.5, 0.0, 0.0]])
    heards = [heard(0, [1.1, 3.2, 4.1], [1, 2, 1]), heard(1, [2.6, 3.9], [1, 1])]  # two tokens came as one message
    late, tokens, messages = load.delays(heards, stamps, (2.0, 3.6))
    assert sorted(late) == pytest.approx([0.1, 0.2, 0.4, 1.2])
    assert (tokens, messages) == (4, 3)


def test_errors() -> None:
    assert load.errors([heard(0, [1.0], [4])], 4) == []
    found = load.errors([heard(1, [1.0], [3]), heard(2, [], [], refused=True), heard(3, [], [], error="why")], 4)
    assert found == ["1: 3 of 4 tokens", "2: refused", "3: why"]


def run(**changes: object) -> dict:
    spread = {"median": 0.001, "p99": 0.009, "max": 0.1}
    cpu = {"front": 50e-6, "engine": 1e-5, "client": 1e-5}
    return {"errors": [], "load": {"groups": 10}, "cpu_per_token": cpu, "delivery": spread, "tokens_per_second": 1.0,
            "used_by_others": 0.0} | changes  # fmt: skip


def crowd(rejection: float, ttft: float, factor: float = 2.0) -> dict:
    spreads = {
        name: {"median": p99, "p99": p99, "max": p99} for name, p99 in (("rejection", rejection), ("ttft", ttft))
    }
    told = {"errors": ["1: x"], "queue_bound": 1.0, "requests": 4, "refused": 2, "used_by_others": 0.2}
    return told | spreads | {"load": {"factor": factor}}


def full(refusal: float, at_once: int) -> dict:
    costs = {"front": 80e-5, "engine": 1e-5, "client": 1e-5}
    spread = {"median": refusal, "p99": refusal, "max": refusal}
    loaded = {"errors": [], "load": {"at_once": at_once}, "used_by_others": 0.0}
    return loaded | {"refusal": spread, "cpu_per_refusal": costs}


def test_verdicts() -> None:
    costly = run(cpu_per_token={"front": 61e-6, "engine": 0.0, "client": 0.0}, load={"groups": 1})
    runs = {"even": run(), "at once": costly, "overload": crowd(0.011, 1.4)}
    runs |= {"x10": crowd(0.011, 1.4, 10.0), "full": full(0.011, 1), "bursts": full(0.011, 64)}
    found = {name: item["reached"] for name, item in report.verdicts(runs).items()}
    assert found == {
        "even: errors": True,
        "even: front end, us a token": True,
        "even: delivery p99, ms": True,
        "at once: errors": True,
        "at once: front end, us a token": False,
        "overload: errors": False,
        "overload: rejection p99, ms": False,
        "overload: TTFT p99 over the bound": True,
        "x10: errors": False,
        "x10: rejection p99, ms": True,
        "x10: TTFT p99 over the bound": True,
        "full: errors": True,
        "full: refusal p99, ms": False,
        "bursts: errors": True,
        "bursts: refusal p99, ms": True,
    }
    quiet = [f"NOT QUIET: other programs used 20% of the machine during {name}" for name in ("overload", "x10")]
    assert report.doubts(runs) == quiet
    assert "| even | 1 | 50.0 |" in report.table(runs)
    assert "| bursts | 64 | 800 |" in report.table(runs)


def test_the_bound_of_a_queue() -> None:
    crowd = load.Overload("grpc", slots=10, waiting=20, tokens=50, step_seconds=0.02)
    assert crowd.service_rate == pytest.approx(10.0)
    assert crowd.queue_bound == pytest.approx(2.02)


def test_the_engine_keeps_its_pace_and_stamps(tmp_path: pathlib.Path) -> None:
    stamps, config = Stamps(tmp_path / "stamps", 4, 3), EngineConfig(max_num_seqs=4, max_model_len=64, page_size=16)
    engine = PacedEngine(config, 64, Pace(0.04, 2, token=7), stamps)
    for row in range(4):
        engine.add(Request(id_of(row), (1, 2), SamplingParams(max_tokens=3, ignore_eos=True, seed=0)))
    start, deltas = time.monotonic(), []
    while engine.has_work:
        deltas += engine.step()
    assert time.monotonic() - start >= 5 * 0.02  # the first one leaves at once
    assert [d.token_ids for d in deltas] == [[7]] * 12
    assert [d.finish_reason for d in deltas[-4:]] == [FinishReason.LENGTH] * 4
    again = Stamps(tmp_path / "stamps", 4, 3).times  # as the other process sees them
    assert (np.diff(again, axis=1) > 0).all()
    # the second group leaves half a step later; on a busy machine the first one may have been late
    assert (again[1] - again[0] >= 0.01).all()
    assert (again[0] == again[2]).all()


@pytest.mark.slow
@pytest.mark.parametrize("door", ["grpc", "http"])
def test_the_command(door: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    arguments = ["--doors", door, "--streams", "6", "--rate", "120", "--groups", "3", "--seconds", "1"]
    assert serve_load.main([*arguments, "--connections", "2", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [item["figure"] for name, item in result["verdicts"].items() if name.endswith("errors")] == [0] * 6
    even, burst, crowd = (result["runs"][f"{door} {kind}"] for kind in ("even", "at once", "overload"))
    assert 60 < even["tokens_per_second"] < 180
    assert 0 < even["delivery"]["median"] <= burst["delivery"]["max"] + even["delivery"]["max"]
    assert crowd["refused"] > 0
    assert result["runs"][f"{door} full"]["cpu_per_refusal"]["front"] > 0
    assert "delivery p99" in capsys.readouterr().out
