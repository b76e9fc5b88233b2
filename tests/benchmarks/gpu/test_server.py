"""Section server: the server's arguments, the load generator's output, and the report where neither is available."""

import dataclasses
import re
import tomllib

import pytest

from benchmarks.gpu import server, throughput
from benchmarks.gpu.checkpoint import write_checkpoint
from benchmarks.gpu_peers.loads import Load
from jaxinfer.cli.serve import parse
from jaxinfer.gpu_check import __main__ as gpu_check
from jaxinfer.gpu_check.llama import TINY
from jaxinfer.gpu_check.report import Report, read_records
from jaxinfer.loading import load_model
from jaxinfer.serve.settings import QUEUE
from tests.serve.processes import fake_server


@pytest.fixture
def report(tmp_path):
    limits = {"output_tokens_s": {"2 requests, 20 + 4 tokens": 400.0}}
    return Report(tmp_path / "records", seconds=600, quick=True, limits=limits)


def written(report):
    return {record["key"]: record for record in read_records(report.path)}


def test_what_is_written_is_a_model_with_a_tokenizer(tmp_path):
    count = write_checkpoint(tmp_path, {**TINY, "vocab_size": 1000})
    model = load_model(str(tmp_path), show_progress=False)
    assert str(model.dtype) == "bfloat16"
    assert sum(2 * leaf.size for leaf in model.params["layers_0"]["mlp"].values()) < count < 10**6
    assert 0.015 < float(abs(model.params["embed"]["table"].astype("float32")).mean()) / 0.8 < 0.025
    assert (model.params["final_norm"]["scale"] == 1).all()
    assert model.tokenizer.vocab_size == 1000
    texts = [model.tokenizer.decode([token]) for token in range(95, 1000)]
    assert len(set(texts)) == len(texts)
    assert all(text.strip() for text in texts)
    assert model.tokenizer.encode("a text")


def test_the_server_has_the_engines_settings(tmp_path):
    configuration = parse(server._command(tmp_path, server.LOADS)[3:]).configuration
    told = throughput.settings(server.LOADS)
    assert configuration.engine == dataclasses.replace(told, **QUEUE)
    assert configuration.grpc_port == 0
    assert set(server.LOADS) <= set(throughput.LOADS)
    assert {load.requests for load in server.LOADS} == {1, 8, 64, 256}


def test_the_load_generator_is_run_and_read(tmp_path, report):
    with fake_server(tmp_path) as fake:
        server._measure(report, fake.grpc_port, Load(2, 20, 4), tmp_path / "figures")
        server._measure(report, fake.grpc_port, Load(1, 10, 4), tmp_path / "figures")
    two, one = written(report).values()
    assert two["ok"]
    assert two["of_engine"] == pytest.approx(two["output_tokens_s"] / 400.0, abs=1e-4)
    assert two["ttft_p50_ms"] > 0
    assert two["tpot_p99_ms"] >= two["tpot_p50_ms"] > 0
    assert "of_engine" not in one


def test_a_load_that_fails_is_wrong(report):
    found = {
        "requests": 2,
        "completed": 1,
        "other_length": 0,
        "errors": {"UNAVAILABLE": 1},
        "seconds": 1.0,
        "error_examples": {"UNAVAILABLE": "gone"},
        "output_tokens_per_second": 4.0,
        "tokens_per_second": 5.0,
        "latency": dict.fromkeys(("ttft", "tpot", "itl")),
        "generator": {"doubts": ["it used 99% of a processor"]},
    }
    figures = server._figures(found)
    assert (figures["ok"], figures["error"]) == (False, "{'UNAVAILABLE': 'gone'}")
    assert figures["doubts"] == ["it used 99% of a processor"]
    assert server._figures({**found, "completed": 2})["ok"]
    assert not server._figures({**found, "completed": 2, "other_length": 1})["ok"]


def test_a_server_that_ends_is_told_with_what_it_said(report, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_command", lambda *_: ["sh", "-c", "echo no such model >&2; exit 2"])
    with pytest.raises(RuntimeError, match="no such model"), server._started(report, "cold", tmp_path, ()):
        raise AssertionError("it is ready")


def test_where_grpc_is_not_installed_it_says_so_and_starts_the_engine_alone(report, monkeypatch):
    monkeypatch.setattr(server, "NEEDED", ("numpy", "no-such-grpcio"))
    monkeypatch.setattr(server, "_start_engine", lambda cache, report: {"seconds_to_start": 3.0})
    server.run(report)
    found = written(report)
    assert found["server"]["skipped"] == "not run: no-such-grpcio not installed; the engine alone is started"
    assert [found[f"engine, {start}"]["seconds_to_start"] for start in ("cold", "warm")] == [3.0, 3.0]


def test_what_is_needed_is_what_the_package_declares(repo):
    declared = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w.-]+", each)[0] for each in declared}
    assert set(server.NEEDED) == names - {"jax", "flax", "numpy"}


def test_rates_of_the_engine_are_known_to_it(tmp_path):
    results = gpu_check.Results(tmp_path, {"kind": "NVIDIA H200", "platform": "gpu"}, quick=False)
    records = [{"key": "engine", "rows": 64}, {"key": "64 requests, 512 + 256 tokens", "output_tokens_s": 5000.0}]
    results.put("engine", {"status": "ok", "seconds": 1.0, "records": records})
    assert results.limits()["output_tokens_s"] == {"64 requests, 512 + 256 tokens": 5000.0}


@pytest.mark.slow
def test_an_engine_starts_alone(report, tmp_path):
    server._start_engines(report, tmp_path)
    cold, warm = (record["seconds_to_start"] for record in written(report).values())
    assert cold > warm > 0
    assert list((tmp_path / "cache").iterdir())
