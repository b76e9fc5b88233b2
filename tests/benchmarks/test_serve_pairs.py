"""benchmarks/serve_pairs.py runs both sides and measures their difference."""

import json
import pathlib
import shutil

import pytest

from benchmarks import serve_pairs


@pytest.mark.slow
def test_a_slower_checkout_is_found(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other checkout wastes a millisecond of the front end on each token."""
    other, out = tmp_path / "other", tmp_path / "pairs.json"
    for name in ("jaxinfer", "benchmarks", "pallas_kernels"):
        shutil.copytree(serve_pairs.HERE / name, other / name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    generation = other / "jaxinfer/serve/frontend/generation.py"
    source = generation.read_text()
    taken = "        new = output.take(delta)\n"
    assert taken in source
    generation.write_text(source.replace(taken, taken + "        sum(range(20_000))\n"))
    options = ["--pairs", "2", "--doors", "http", "--streams", "20", "--rate", "400", "--seconds", "2"]
    assert serve_pairs.main([str(other), *options, "--out", str(out)]) == 0
    pairs = json.loads(out.read_text())["pairs"]["http"]
    assert len(pairs) == 2
    assert all(0 < one["here"] < one["there"] for one in pairs)
    assert "ratio median 0." in capsys.readouterr().out
