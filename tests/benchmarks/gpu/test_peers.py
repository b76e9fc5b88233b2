"""Section peers, where torch is not installed."""

import importlib.util

from benchmarks.gpu import peers
from jaxinfer.gpu_check.report import Report, read_records


def test_peers_that_are_not_there(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else found(name, *rest)
    )
    report = Report(tmp_path / "records", seconds=600, quick=True, limits={})
    peers.run(report)
    assert read_records(report.path) == [{"key": "torch", "skipped": "not installed"}]
