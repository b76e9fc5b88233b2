"""benchmarks/attention_cpu.py: its arithmetic, and a run with jaxinfer on both sides."""

import json
import statistics
import sys

import pytest

from benchmarks import attention_cpu
from benchmarks.attention.shapes import LAYERS, Shape, timed


def test_a_turn_has_at_least_three_calls_and_lasts_its_seconds():
    assert len(timed(lambda: None, 0.0)) == 3
    assert len(timed(lambda: None, 0.01)) > 3


def test_a_ratio_above_one_is_ours_being_faster():
    class Peer:
        def __init__(self, *seconds):
            self.seconds = list(seconds)

        def ask(self, op, **request):
            assert request["shape"]["lengths"] == (5,)
            return {"median": self.seconds.pop(0)}

    options = attention_cpu.parse(["--rounds", "3"])
    peers = {"ours": Peer(1e-6, 2e-6, 4e-6), "torch": Peer(2e-6, 8e-6, 4e-6)}
    row = attention_cpu.measure(peers, Shape("x", 1, (5,)), "float32", options)
    assert (row["ours_us"], row["torch_us"], row["ratio"]) == (2.0, 4.0, 2.0)


@pytest.mark.slow
def test_the_command_measures_and_keeps_a_record(tmp_path, monkeypatch):
    """jaxinfer's own peer is on both sides; torch needs a separate interpreter."""
    monkeypatch.setattr(attention_cpu, "PEERS", dict.fromkeys(("ours", "torch"), "attention.xla_peer"))
    out = tmp_path / "record.json"
    words = [
        "--oracle-python",
        sys.executable,
        "--rounds",
        "1",
        "--seconds",
        "0",
        "--only",
        "decode 1 x 128",
        "--dtypes",
        "float32",
        "--out",
        str(out),
    ]
    assert attention_cpu.main(words) == 0
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert row["shape"] == "decode 1 x 128"
    assert 0 < statistics.median([row["ours_us"], row["torch_us"]]) < 1e6 * LAYERS
    assert record["versions"]["ours"]["jax"]


def test_an_interpreter_without_torch_is_named(tmp_path, capsys):
    assert attention_cpu.main(["--oracle-python", sys.executable, "--only", "decode 1 x 128"]) == 2
    assert "torch" in capsys.readouterr().err
