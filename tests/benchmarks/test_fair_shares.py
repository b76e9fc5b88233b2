"""benchmarks/fair_shares.py runs, and its figures are consistent."""

import json
import pathlib

import pytest

from benchmarks import fair_shares


@pytest.mark.slow
def test_it_runs_and_keeps_its_figures(tmp_path: pathlib.Path, capsys) -> None:
    out = tmp_path / "fair.json"
    assert fair_shares.main(["--floods", "2", "--probes", "2", "--between", "1", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tenants"] == 2
    assert 0 < row["jain"] <= 1
    assert all(each > 0 for name in ("solo_ms", "flood_ms", "ratio") for each in row[name])
    assert "| 2 |" in capsys.readouterr().out
