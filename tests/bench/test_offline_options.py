"""Tests of the options of the offline benchmarks."""

import pathlib

import pytest

from jaxinfer.bench.commands import parse
from jaxinfer.bench.datasets import Lengths


def test_each_command_has_its_own_requests():
    latency, throughput = parse(["latency", "demo"]), parse(["throughput", "demo"])
    assert (latency.command, latency.requests, latency.iterations, latency.warmup) == ("latency", 8, 30, 10)
    assert (throughput.command, throughput.requests, throughput.iterations) == ("throughput", 200, 1)
    assert latency.model == "demo"
    assert latency.work == throughput.work == "jaxinfer.bench.offline"
    assert latency.backends == ["jaxinfer"]
    assert not hasattr(parse(["serve", "--target", "grpc://h:1"]), "work")


def test_engine_settings_and_requests_are_given_as_for_other_commands():
    options = parse(
        [
            "throughput",
            "a/b",
            "-tp",
            "2",
            "--max-num-seqs",
            "4",
            "--input-len",
            "16:32",
            "--prefix-len",
            "8",
            "--seed",
            "3",
        ]
    )
    assert options.settings == {"tensor_parallel_size": 2, "max_num_seqs": 4}
    assert (options.dataset, options.input_len, options.seed) == ("shared-prefix", Lengths(16, 32), 3)


def test_transformers_is_measured_beside_jaxinfer():
    options = parse(["latency", "demo", "--backend", "transformers", "--out", "o.json", "--compare", "c.json"])
    assert options.backends == ["jaxinfer", "transformers"]
    assert (options.out, options.compare) == (pathlib.Path("o.json"), pathlib.Path("c.json"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["latency", "demo", "--batch-size", "0"], "--batch-size"),
        (["latency", "demo", "--warmup", "-1"], "--warmup"),
        (["latency", "demo", "--random-range-ratio", "2"], "--random-range-ratio"),
        (["latency", "demo", "--num-prompts", "3"], "--num-prompts"),
        (["latency", "demo", "--max-num-seqs", "0"], "max_num_seqs"),
        (["throughput", "demo", "--backend", "mii"], "--backend"),
        (["throughput", "demo", "--iterations", "x"], "--iterations"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, words, said):
    with pytest.raises(SystemExit) as left:
        parse(words)
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_help_shows_the_common_options(capsys, command):
    with pytest.raises(SystemExit) as left:
        parse([command, "--help"])
    assert left.value.code == 0
    page = capsys.readouterr().out
    assert all(option in page for option in ("--input-len", "--out", "--compare", "--backend", "--iterations"))
