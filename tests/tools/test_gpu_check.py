"""gpu_check runs from end to end without a GPU, keeps what a killed section wrote, and never passes a CPU for a GPU."""

import json
import time

import numpy as np
import pytest

from tools.gpu_check import __main__ as gpu_check
from tools.gpu_check import demo
from tools.gpu_check.reference import Case, float64_decode, poisoned_case
from tools.gpu_check.report import Report, read_records


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results file of one quick run of all sections."""
    folder = tmp_path_factory.mktemp("results")
    code = gpu_check.main(["--quick", "--out", str(folder)])
    (path,) = folder.iterdir()
    content = json.loads(path.read_text())
    failed = {name: section for name, section in content["sections"].items() if section["status"] != "ok"}
    assert code == 0, failed
    return path, content


def records_of(content, section):
    return {record["key"]: record for record in content["sections"][section]["records"]}


def test_a_cpu_is_called_a_cpu(results):
    path, content = results
    assert path.name == f"cpu-{content['date']}-quick.json"
    assert (content["device"]["platform"], content["quick"], content["note"]) == ("cpu", True, gpu_check.CPU_NOTE)
    assert records_of(content, "device")["nvidia-smi"]


def test_every_section_measures_something(results):
    _, content = results
    assert tuple(content["sections"]) == gpu_check.NAMES
    assert records_of(content, "copy")["best"]["gb_s"] > 0
    errors = {key: record.get("error") for s in content["sections"] for key, record in records_of(content, s).items()}
    assert not any(errors.values()), errors
    assert all(record["relative_error"] < 0.05 for record in records_of(content, "gemm").values())
    assert all(record["classes"] for record in records_of(content, "rows").values())


def test_the_kernel_is_checked(results):
    (parity,) = (r for key, r in records_of(results[1], "paged").items() if key.startswith("parity"))
    assert parity["relative_error"] < 2e-3
    assert parity["finite"]
    assert parity["same_bits_twice"]
    assert parity["same_bits_alone"]


def test_the_step_reports_its_share_of_the_measured_bandwidth(results):
    steps = {key: r for key, r in records_of(results[1], "step").items() if "context" in key}
    assert len(steps) == 2
    assert all(r["share_of_copy"] > 0 and r["best_ms"] <= r["median_ms"] for r in steps.values())


def test_the_demo_generates(results):
    records = records_of(results[1], "demo")
    if not (demo.DEMO / "config.json").is_file():
        assert "holds no model" in records["greedy"]["skipped"]
    else:
        assert len(records["float32"]["token_ids"]) == demo.QUICK_TOKENS


def test_agreement_ends_at_the_first_difference():
    assert demo._common([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert demo._common([1, 2], [1, 2]) == 2


def test_without_a_gpu_only_quick_runs(tmp_path, capsys):
    assert gpu_check.main(["--out", str(tmp_path), "--only", "copy"]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unknown_section():
    with pytest.raises(SystemExit) as stop:
        gpu_check.parse(["--only", "copy,speed"])
    assert stop.value.code == 2


def test_a_section_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr(gpu_check, "SECTIONS", (("copy", "bandwidth", 0.3),))
    monkeypatch.setattr(gpu_check, "QUICK_PATIENCE", 1)
    start = time.monotonic()
    section = gpu_check.run_section("copy", True, {})
    assert section["status"] == "stopped after 0.3 s"
    assert time.monotonic() - start < 5


def test_a_section_that_crashes_is_told(monkeypatch):
    monkeypatch.setattr(gpu_check, "SECTIONS", (("nowhere", "nowhere", 60),))
    section = gpu_check.run_section("nowhere", True, {})
    assert section["status"].startswith("failed")
    assert "Traceback" in section["stderr"]


def test_records_survive_a_torn_line_and_a_failed_item(tmp_path):
    report = Report(tmp_path / "records", seconds=10, quick=True, limits={"copy": 100.0})
    report.put("a", value=1)
    with report.attempt("b"):
        raise RuntimeError("out of memory")
    report.put("a", value=2)
    with (tmp_path / "records").open("a") as file:
        file.write('{"key": "c", "val')
    a, b = read_records(tmp_path / "records")
    assert (a["value"], b["error"]) == (2, "RuntimeError: out of memory")


def test_bandwidth_is_bytes_over_time(tmp_path):
    report = Report(tmp_path / "records", seconds=10, quick=True, limits={"copy": 2000.0, "datasheet": 4000.0})
    assert report.bandwidth(10**9, 1.0) == {
        "bytes": 10**9,
        "gb_s": 1000.0,
        "share_of_copy": 0.5,
        "share_of_datasheet": 0.25,
    }


def test_sections_fit_into_eight_minutes():
    assert sum(seconds for *_, seconds in gpu_check.SECTIONS) < 480


def test_later_runs_keep_the_sections_of_the_day(tmp_path):
    device = {"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu"}
    gpu_check.Results(tmp_path, device, quick=False).put("copy", {"records": [{"key": "best", "gb_s": 3000.0}]})
    again = gpu_check.Results(tmp_path, device, quick=False)
    again.put("gemm", {"records": []})
    assert set(json.loads(again.path.read_text())["sections"]) == {"copy", "gemm"}
    assert again.path.name.startswith("nvidia-h100-80gb-hbm3-20")
    assert "note" not in again.content
    assert again.bandwidths() == {"copy": 3000.0, "datasheet": 3350.0}


def test_the_reference_by_hand():
    """Two keys with scores 0 and log 3: weights 1/4 and 3/4."""
    pool = np.zeros((1, 2, 1, 4, 2))
    pool[0, 0, 0, 1, 0] = np.log(3)
    pool[0, 1, 0, :2] = [[4.0, 0.0], [8.0, 4.0]]
    case = Case(np.array([[[1.0, 0.0]]]), pool, np.array([[0]], np.int32), np.array([2], np.int32))
    np.testing.assert_allclose(float64_decode(case, 1.0), [[[7.0, 3.0]]])


def test_poison_is_out_of_reach_of_the_reference():
    case = poisoned_case((5, 0, 9), page=4, dtype=np.float32)
    assert np.isnan(case.pool).any()
    assert np.isfinite(float64_decode(case, 0.1)).all()
