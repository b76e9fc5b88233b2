"""Section agree, log-probabilities: the records of a run at tiny sizes, of a difference and of a run without modes."""

import types

import pytest

from jaxinfer.agreement import Difference
from jaxinfer.gpu_check import on_policy
from jaxinfer.gpu_check.report import Report, read_records


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path / "records", seconds=600, quick=True, limits={})


def written(report):
    return {record["key"]: record for record in read_records(report.path)}


def test_a_run_compares_all_tokens_with_both(report, monkeypatch):
    monkeypatch.setattr(on_policy, "DTYPES", ("float32",))
    on_policy.run(report)
    found = written(report)
    name = "log-probabilities, float32"
    assert found[name]["ok"], found
    assert min(found[name]["preemptions"], found[name]["cached_tokens"]) > 0
    exact = [found[f"{name}: {by}"] for by in ("LLM.logprobs", "Model.logprobs")]
    assert [(each["ok"], each["largest"], each["kl"]) for each in exact] == [(True, 0, 0)] * 2
    applied = found[f"{name}: Model.apply"]
    assert 0 < applied["largest"] < 1e-4
    assert "ok" not in applied
    assert {each["tokens"] for each in (*exact, applied)} == {12 * 24}


@pytest.mark.parametrize(("exact", "verdict"), [(True, {"ok": False}), (False, {})])
def test_a_difference_is_wrong_where_there_must_be_none(report, exact, verdict):
    on_policy._put(report, "x", Difference(3, 1e-7, 1e-15), exact=exact)
    assert written(report)["x"] == {"key": "x", **verdict, "tokens": 3, "largest": 1e-7, "kl": 1e-15}


@pytest.mark.parametrize(("preempted", "hits", "ok"), [(1, 2, True), (0, 2, False), (1, 0, False)])
def test_a_run_that_preempts_none_or_finds_no_prefix_is_wrong(preempted, hits, ok):
    stats = types.SimpleNamespace(preemptions={"recompute": preempted, "swap": 0}, prefix_hits=hits)
    engine = types.SimpleNamespace(stats=lambda: stats, config=types.SimpleNamespace(gemm_backend="mosaic"))
    assert on_policy._modes(engine)["ok"] == ok
