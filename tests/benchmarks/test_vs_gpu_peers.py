"""benchmarks/vs_gpu_peers.py: its arithmetic by hand, its peers with fake engines, and the whole command."""

import json
import pathlib
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from benchmarks import vs_gpu_peers
from benchmarks.gpu_peers import report
from benchmarks.gpu_peers.drive import drive
from benchmarks.gpu_peers.loads import Load, parse_loads
from benchmarks.gpu_peers.session import Peer, Session, Task
from benchmarks.gpu_peers.timeline import Timeline

HERE = pathlib.Path(__file__).parent


def test_loads_are_read_as_they_are_written():
    loads = parse_loads("8x512+256,300x1024+256@0.7")
    assert loads == (Load(8, 512, 256), Load(300, 1024, 256, 0.7))
    assert ",".join(map(str, loads)) == "8x512+256,300x1024+256@0.7"


@pytest.mark.parametrize("text", ["8x512", "x512+2", "8x512+256@7", "0x5+6", "8x5+0", "8x5+6@0.0"])
def test_loads_that_are_none_are_named(text: str):
    with pytest.raises(ValueError, match=text.replace("+", r"\+")):
        parse_loads(text)


def test_prompts_are_others_for_each_seed_and_the_same_for_one():
    load = Load(3, 20, 4)
    first, again, other = load.prompts("a", 50), load.prompts("a", 50), load.prompts("b", 50)
    assert first == again != other
    assert [len(prompt) for prompt in first] == [20, 20, 20]
    assert all(3 <= token < 50 for prompt in first for token in prompt)


def test_arrivals_have_the_rate_that_was_asked_for():
    load = Load(4000, 1, 1, 0.5)
    due = load.due("a", 20.0)
    assert due == sorted(due)
    assert due[-1] == pytest.approx(200, rel=0.1)
    assert Load(3, 1, 1).due("a", None) == [0.0, 0.0, 0.0]


def test_figures_by_hand(monkeypatch: pytest.MonkeyPatch):
    timeline = Timeline([0.0, 1.0])
    for now, request, tokens in ((0.5, 0, 1), (1.5, 0, 2), (2.0, 1, 1), (4.0, 1, 2)):
        monkeypatch.setattr(timeline, "now", lambda now=now: now)
        timeline.add(request, tokens)
    found = timeline.figures(3)
    assert (found["seconds"], found["requests_per_second"], found["output_tokens_per_second"]) == (4.0, 0.5, 1.5)
    assert (found["ttft_ms_p50"], found["tpot_ms_p50"]) == (500.0, 500.0)
    with pytest.raises(RuntimeError, match="request 0 has 3 tokens, not 4"):
        timeline.figures(4)


class Stepped:
    """An engine of two slots, one token a step."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.added: list[float] = []

    def add(self, request: int, prompt: Sequence[int], output: int) -> None:
        assert len(prompt) == 5
        self.left[request] = output
        self.added.append(time.perf_counter())

    def step(self) -> Iterable[tuple[int, int]]:
        running = list(self.left)[:2]
        for request in running:
            self.left[request] -= 1
        self.left = {request: left for request, left in self.left.items() if left}
        return [(request, 1) for request in running]

    @property
    def has_work(self) -> bool:
        return bool(self.left)


def test_requests_enter_when_they_are_due():
    engine, load = Stepped(), Load(3, 5, 4)
    found = drive(engine, load, load.prompts("a", 50), [0.0, 0.05, 0.1])
    assert engine.added[1] - engine.added[0] >= 0.045
    assert engine.added[2] - engine.added[0] >= 0.095
    assert 0.1 <= found["seconds"] < 5
    assert 0 < found["ttft_ms_p50"] < 50


def record(**engines: tuple[float, ...]) -> dict[str, Any]:
    starts = [
        {"round": number, "engine": engine, "seconds_to_ready": 9.0 - number, "device_mib": 7, "loads": {"1x2+3": load}}
        for engine, rates in engines.items()
        for number, rate in enumerate(rates)
        for load in [{"output_tokens_per_second": rate, "ttft_ms_p50": 1.0, "ttft_ms_p99": 2.0}]
    ]
    device = {"name": "NVIDIA X", "gpu": True}
    told = {"check": {"jaxinfer": [1, 2, 3], "vllm": [1, 2, 4]}, "absent": {"torch": "no module"}, "skipped": []}
    return {"starts": starts, "device": device, "date": "2026-01-02T03:04:05", **told}


def test_ratios_are_those_of_a_round_and_know_their_goals():
    found = report.summary(record(jaxinfer=(100.0, 300.0, 80.0), vllm=(50.0, 100.0, 100.0)))
    assert found["ratios"] == [
        {"load": "1x2+3", "engine": "vllm", "ratio": 2.0, "low": 0.8, "high": 3.0}
        | {"goal": 1.0, "floor": 0.9, "verdict": "goal"}
    ]
    assert found["starts"]["vllm"] == {"cold": 9.0, "warm": 7.5, "device_mib": 7}
    assert report.below_floor(record(jaxinfer=(89.0,), vllm=(100.0,))) == ["1x2+3: 0.89 of vllm, floor 0.9"]
    assert report.below_floor(record(jaxinfer=(91.0,), vllm=(100.0,))) == []
    slow = record(jaxinfer=(89.0,), vllm=(100.0,)) | {"device": {"name": "a CPU", "gpu": False}}
    assert report.below_floor(slow) == []


def test_the_table_says_what_is_missing():
    text = report.table(record(jaxinfer=(100.0,), vllm=(50.0,)))
    assert "| 1x2+3 | vllm | 50 | 1.0 / 2.0 |  /  | 2.00 goal |" in text
    assert "same greedy tokens as jaxinfer: vllm: 2 of 3" in text
    assert "absent: torch: no module" in text
    assert "not a GPU" not in text


def task(tmp_path: pathlib.Path, **changes: Any) -> Task:
    settings = {"dtype": "bfloat16", "max_num_seqs": 4, "max_model_len": 64, "gpu_memory_utilization": 0.5}
    return Task({"vocab_size": 50}, settings, parse_loads("1x4+3,4x4+3,4x4+3@0.5"), "", tmp_path)


def fake_vllm(python: str, monkeypatch: pytest.MonkeyPatch) -> Peer:
    monkeypatch.setenv("PYTHONPATH", str(HERE / "fake_vllm"))
    return Peer("vllm", (python, "-m", "benchmarks.gpu_peers.vllm_peer"))


def test_a_session_keeps_what_each_start_does(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    kept: list[int] = []
    session = Session(task(tmp_path), time.monotonic() + 60, lambda record: kept.append(len(record["starts"])))
    dying = Peer("torch", ("sh", "-c", "echo no torch here >&2; exit 3"))
    found = session.run([dying, fake_vllm("python3", monkeypatch)], 2)
    assert found["absent"] == {"torch": "torch: exit status 3: no torch here"}
    assert [(start["engine"], start["round"], list(start["loads"])) for start in found["starts"]] == [
        ("vllm", 0, ["1x4+3", "4x4+3"]),
        ("vllm", 1, ["1x4+3", "4x4+3", "4x4+3@0.5"]),
    ]
    rates = [start["loads"]["4x4+3"]["requests_per_second"] for start in found["starts"]]
    assert found["starts"][1]["loads"]["4x4+3@0.5"]["rate"] == pytest.approx(0.5 * rates[1])
    assert found["versions"] == {"vllm": {"vllm": "0.0"}}
    assert kept[-1] == 2


def test_a_session_without_time_says_what_it_left_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    session = Session(task(tmp_path), time.monotonic() + 1, lambda record: None)
    found = session.run([fake_vllm("python3", monkeypatch)], 1)
    assert (found["starts"], found["skipped"]) == ([], ["round 0: vllm: no time was left"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loads", "8x4"], "'8x4' is not REQUESTS"),
        (["--loads", "8x4+4@0.5"], "one load must come all at once"),
        (["--engines", "sglang"], "'sglang' is none of jaxinfer"),
        (["--loads", "8x4096+4"], "8x4096\\+4 is longer than --max-model-len 2048"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        vs_gpu_peers.parse(arguments)
    assert re.search(message, capsys.readouterr().err)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vs_gpu_peers.device, "describe", lambda: {"name": "a CPU", "gpu": False})
    assert vs_gpu_peers.main([]) == 2
    assert "--quick" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_command_runs_to_its_end(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    assert vs_gpu_peers.main(["--quick", "--work-dir", str(tmp_path)]) == 0
    assert "| 8x24+8@0.7 | jaxinfer |" in capsys.readouterr().out
    found = json.loads((tmp_path / "quick.json").read_text())
    assert [start["round"] for start in found["starts"]] == [0, 1]
    assert (tmp_path / "quick.png").read_bytes()[:4] == b"\x89PNG"
    assert vs_gpu_peers.main(["--show", str(tmp_path / "quick.json")]) == 0


@pytest.mark.parity
def test_pytorchs_llama_has_the_tokens_of_jaxinfer(
    tmp_path: pathlib.Path, oracle_python: pathlib.Path, test_data: pathlib.Path
):
    folder = test_data / "models" / "stories260K" / "hf"
    model = ["--model", str(folder), "--dtype", "float32", "--loads", "2x8+4", "--rounds", "1"]
    engines = ["--engines", "jaxinfer,torch", "--torch-python", str(oracle_python)]
    assert vs_gpu_peers.main(["--quick", "--work-dir", str(tmp_path), *model, *engines]) == 0
    found = json.loads((tmp_path / "quick.json").read_text())
    assert len(found["check"]["torch"]) == 32
    assert found["check"]["torch"] == found["check"]["jaxinfer"]
