"""benchmarks/image_encoders_cpu.py: its arithmetic, and a run with jaxinfer on both sides."""

import json
import sys
import types

import pytest

from benchmarks import image_encoders_cpu


class Fake:
    """A peer that takes these seconds, turn after turn."""

    def __init__(self, *medians: float) -> None:
        self.medians, self.asked = list(medians), []

    def ask(self, op: str, **request: object) -> dict:
        self.asked.append((op, request))
        return {"median": self.medians.pop(0)}


def test_a_ratio_is_the_median_of_turns_not_of_sides() -> None:
    """The machine slows down in the last turn: both sides of it."""
    peers = {"ours": Fake(0.001, 0.002, 0.008), "torch": Fake(0.002, 0.002, 0.016)}
    options = types.SimpleNamespace(rounds=3, seconds=0.1)
    row = image_encoders_cpu.measure(peers, "tiny", "224 x 224", "float32", options)
    assert (row["ours_ms"], row["torch_ms"], row["ratio"]) == (2.0, 2.0, 2.0)
    assert peers["ours"].asked[0] == (
        "encode",
        {"tower": "tiny", "grid": (1, 16, 16), "dtype": "float32", "seconds": 0.1},
    )


@pytest.mark.slow
def test_a_run_writes_a_row_for_each_tower_size_and_dtype(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        image_encoders_cpu, "PEERS", {"ours": "image_encoders.jax_peer", "torch": "image_encoders.jax_peer"}
    )
    monkeypatch.setattr(image_encoders_cpu, "TOWERS", {"tiny": {}})
    monkeypatch.setattr(image_encoders_cpu, "GRIDS", {"224 x 224": (1, 16, 16)})
    out = tmp_path / "rows.json"
    words = ["--oracle-python", sys.executable, "--rounds", "1", "--seconds", "0.01", "--out", str(out)]
    assert image_encoders_cpu.main([*words, "--dtypes", "float32"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["tower"], row["size"], row["dtype"]) for row in rows] == [("tiny", "224 x 224", "float32")]
    assert rows[0]["ratio"] > 0


def test_an_interpreter_without_torch_is_named(capsys) -> None:
    assert image_encoders_cpu.main(["--oracle-python", sys.executable, "--rounds", "1"]) == 2
    assert "torch" in capsys.readouterr().err
