"""Section copy: the best bandwidth over several processes."""

from benchmarks.gpu import bandwidth
from jaxinfer.gpu_check.report import Report, read_records


def test_the_best_of_a_copy_is_that_of_all_processes(tmp_path, monkeypatch):
    def run(best):
        again = Report(tmp_path / "records", seconds=60, quick=True, limits={})
        monkeypatch.setattr(bandwidth, "_measure", lambda report, mib, key: best)
        bandwidth.run(again)
        return {record["key"]: record for record in read_records(again.path)}["best"]["gb_s"]

    monkeypatch.setattr(bandwidth, "QUICK_MIB", (1,))
    assert run(100.0) == 100.0
    monkeypatch.setattr(bandwidth, "QUICK_MIB", (1, 2))
    assert run(90.0) == 100.0
