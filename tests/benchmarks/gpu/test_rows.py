"""Section rows: classes of row counts, on every path that runs, over several processes."""

import pytest

from benchmarks.gpu import rows
from jaxinfer.gpu_check.report import Report, read_records
from pallas_kernels.choice import Target


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path / "records", seconds=600, quick=True, limits={"gb_s": {"copy": 100.0}, "tflop_s": {}})


def written(report):
    return {record["key"]: record for record in read_records(report.path)}


def test_rows_have_the_kernel_beside_xla_where_it_runs(report, monkeypatch):
    def run():
        rows.run(report)
        return {name: record["classes"] for name, record in written(report).items()}

    assert set(run()) == {"qkv", "gate_up"}
    monkeypatch.setattr(rows, "lowering_target", lambda: Target("gpu", (9, 0)))
    asked = []
    monkeypatch.setattr(rows.dense, "matmul", lambda x, w, **how: asked.append(how) or x[:, :1] + w[:1, 0])
    monkeypatch.setattr(
        rows.quant_matmul, "matmul", lambda x, codes, scales, **how: asked.append(how) or x[:, :1] + scales[0, 0]
    )
    wide = [(name, 128, n, transposed) for name, _, n, transposed in rows.QUICK_PROJECTIONS]
    monkeypatch.setattr(rows, "QUICK_PROJECTIONS", wide)
    found = run()
    assert found["qkv, by the kernel"] == found["gate_up, by the kernel"] == [[1, 2, 3, 4, 8]]
    assert found["qkv, int4 by its kernel"] == found["gate_up, int4 by its kernel"] == [[1, 2, 3, 4, 8]]
    assert {"path": "mosaic"} in asked
    assert {"layout": "in first", "path": "mosaic"} in asked
    assert {"layout": "in last", "path": "mosaic"} in asked


def test_rows_go_on_with_what_an_earlier_process_found(tmp_path, monkeypatch):
    def run(waves):
        again = Report(tmp_path / "records", seconds=60, quick=True, limits={})
        monkeypatch.setattr(rows, "QUICK_WAVES", waves)
        rows.run(again)
        return written(again)["qkv"]

    monkeypatch.setattr(rows, "QUICK_PROJECTIONS", rows.QUICK_PROJECTIONS[:1])
    waves = rows.QUICK_WAVES
    first, both = run(waves[:1]), run(waves)
    assert sorted(row for each in both["classes"] for row in each) == [1, 2, 3, 4, 8]
    assert {row: both["best_ms"][row] for row in first["best_ms"]} == first["best_ms"]
    assert first["bits"].items() < both["bits"].items()
    monkeypatch.setattr(rows, "_measure", None)
    assert run(waves) == both
