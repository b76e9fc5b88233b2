"""Every section of a checkout runs end to end without a GPU; kernels are interpreted."""

import json

import pytest

from benchmarks.gpu import throughput
from jaxinfer.gpu_check import __main__ as gpu_check
from jaxinfer.gpu_check import demo, on_policy
from jaxinfer.gpu_check.problems import FIRST, PROBLEMS


def quick_run(folder, *arguments):
    code = gpu_check.main(["--quick", "--out", str(folder), *arguments])
    (path,) = folder.glob("*.json")
    content = json.loads(path.read_text())
    failed = {name: section for name, section in content["sections"].items() if section["status"] != "ok"}
    assert code == 0, failed
    return path, content


def records_of(content, section):
    return {record["key"]: record for record in content["sections"][section]["records"]}


@pytest.mark.slow
def test_every_section_runs(tmp_path):
    _, content = quick_run(tmp_path, "--only", ",".join(gpu_check.NAMES))
    assert tuple(content["sections"]) == gpu_check.NAMES
    errors = {key: record.get("error") for s in content["sections"] for key, record in records_of(content, s).items()}
    assert not any(errors.values()), errors
    assert all(record["classes"] for record in records_of(content, "rows").values())
    assert len(records_of(content, "parity")) == 2 * FIRST
    checked = records_of(content, "parity-all")
    assert len(checked) == 2 * len(PROBLEMS)
    assert all(record["ok"] for record in checked.values())
    assert all(record["interpreted"] == (record["path"] == "mosaic") for record in checked.values())
    steps = [record for key, record in records_of(content, "step").items() if "context" in key]
    assert all(record["share_of_copy"] > 0 for record in steps)
    assert any("share_of_gemm" in record for record in records_of(content, "step").values())
    for section in ("engine", "relaxed", "formats"):
        assert any(record.get("output_tokens_s", 0) > 0 for record in records_of(content, section).values())
    assert all(record["ok"] for record in records_of(content, "identity").values())
    agreed = {key: record["largest"] for key, record in records_of(content, "agree").items() if "Model.log" in key}
    assert agreed == {f"log-probabilities, {dtype}: Model.logprobs": 0 for dtype in on_policy.DTYPES}
    served = records_of(content, "server")
    assert all(served[throughput.title(load)]["of_engine"] > 0 for load in throughput.QUICK_LOADS)
    assert served["start, warm"]["seconds_to_ready"] < served["start, cold"]["seconds_to_ready"]
    tokens = records_of(content, "demo")
    if (demo.DEMO / "config.json").is_file():
        assert len(tokens["float32"]["token_ids"]) == demo.QUICK_TOKENS
