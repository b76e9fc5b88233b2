"""Tests of the offline benchmarks on the demo model, as a user types them."""

import json

import pytest

from jaxinfer.cli.app import main

ENGINE = ["--max-model-len", "256", "--max-num-seqs", "4", "--prefill-sizes", "64"]
SHORT = ["demo", "--input-len", "24", "--output-len", "6", "--warmup", "1", *ENGINE]


@pytest.mark.slow
def test_latency_writes_a_file_and_compares_with_it(tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert main(["bench", "latency", *SHORT, "--batch-size", "3", "--iterations", "2", "--out", str(before)]) == 0
    content = json.loads(before.read_text())
    figures = content["backends"]["jaxinfer"]
    assert (content["command"], content["settings"]["model"], content["device"]) == ("latency", "demo", "cpu")
    assert len(figures["iterations"]) == 2
    assert (figures["requests"], figures["input_tokens"], figures["output_tokens"]) == (6, 6 * 24, 6 * 6)
    assert figures["cached_tokens"] == 0  # prompts are new in each iteration
    assert set(figures["latency"]) >= {"iteration", "ttft", "tpot", "itl", "e2e"}
    assert figures["memory"]["devices"][0]["parts"]["weights"] > 0
    capsys.readouterr()
    again = [*SHORT, "--batch-size", "3", "--iterations", "2", "--seed", "1", "--out", str(after)]
    assert main(["bench", "latency", *again, "--compare", str(before)]) == 0
    told = capsys.readouterr().out
    assert "now / before" in told
    assert "seed 0 -> 1" in told


@pytest.mark.slow
def test_throughput_of_texts_with_drafts(tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--dataset", "sonnet", "--prefix-len", "16", "--num-requests", "6", "--speculative", "ngram"]
    assert main(["bench", "throughput", *SHORT, *words, "--out", str(out)]) == 0
    figures = json.loads(out.read_text())["backends"]["jaxinfer"]
    assert (figures["completed"], figures["other_length"]) == (6, 0)
    assert figures["requests_per_second"] > 0
    assert figures["speculation"] is None or figures["speculation"]["drafts"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compare", "nowhere.json"], "nowhere.json"),
        (["--out", "no/such/folder/out.json"], "cannot be written"),
        (["--backend", "transformers"], "--transformers-python"),
        (["--dataset", "sharegpt", "--dataset-path", "x.json", "--backend", "hf"], "--transformers-python"),
    ],
)
def test_what_cannot_be_measured_is_said_before_the_engine_starts(capsys, monkeypatch, words, said):
    monkeypatch.setattr("jaxinfer.bench.offline.LLM", None)
    assert main(["bench", "throughput", "demo", *words]) == 2
    assert said in capsys.readouterr().err
