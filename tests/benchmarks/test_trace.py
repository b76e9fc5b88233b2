"""benchmarks/trace.py: the whole command, on small traces: without a model, and with a tiny one."""

import json
import pathlib

import pytest

from benchmarks import trace
from benchmarks.peers.random_model import write
from benchmarks.traces.fake import FakeServer, Pace, resolved
from benchmarks.traces.ideal import BatchingBound, lru_hits
from benchmarks.traces.replay import Arrival, replay
from jaxinfer.config import EngineConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request

OUTPUTS = [24, 3, 6, 2, 18, 1, 9, 4, 30, 2, 2, 5]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models") / "one-layer"
    write(folder, TINY)
    return folder


@pytest.fixture
def traces(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a folder with twelve requests in each format. Mooncake's are three conversations of four turns."""
    azure = [f"2023-11-16 18:15:{40 + i // 2}.0000000,{20 + 3 * i},{output}" for i, output in enumerate(OUTPUTS)]
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    (tmp_path / "azure_2023_conv.csv").write_text("\n".join([header, *azure]) + "\n")
    lines = []
    for i, output in enumerate(OUTPUTS):
        blocks = [100 * (i % 3) + block for block in range(2 + i // 3)]
        row = {"timestamp": 500 * i, "input_length": 512 * len(blocks), "output_length": output, "hash_ids": blocks}
        lines.append(json.dumps(row))
    (tmp_path / "mooncake_synthetic.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(traces: pathlib.Path, *arguments: str) -> dict:
    out = traces / "out.json"
    sizes = ["--max-num-seqs", "2", "--threads", "1"]
    assert trace.main([arguments[0], "--traces", str(traces), "--out", str(out), *sizes, *arguments[1:]]) == 0
    return json.loads(out.read_text())


def test_without_a_model_time_is_a_formula() -> None:
    config = EngineConfig(max_num_seqs=2, page_size=16, prefill_sizes=(32, 64))
    server = FakeServer(resolved(config, 256), Pace(decode_step=1.0, prompt_token=0.01))
    params = SamplingParams(max_tokens=3, seed=0)
    arrivals = [Arrival(due, lambda due=due: Request(str(due), tuple(range(33)), params)) for due in (0.0, 10.0)]
    found = replay(server, arrivals)
    first, second = found.times
    assert (first.first, first.last) == pytest.approx((1.32, 3.32))  # 32 tokens in a chunk and the last one as a row
    assert (second.first, second.last) == pytest.approx((11.0, 13.0))  # both pages are cached
    assert found.counters.hits == 32
    assert len(server.plan_seconds) == len(server.commit_seconds) == len(server.cpu_seconds) == found.steps


def test_azure_without_a_model(traces: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(traces, "azure", "--model", "none")
    (figures,) = result["runs"]["served"]
    assert figures["output_tokens"] == sum(OUTPUTS)
    assert figures["requests"] == 12
    assert 0 < figures["kv_waste"] < 0.5
    assert figures["prefix_hit_rate"] == 0.0
    assert result["trace"]["longest"] == max(20 + 3 * i + output for i, output in enumerate(OUTPUTS))
    assert "KV waste" in capsys.readouterr().out


def test_part_of_a_trace(traces: pathlib.Path) -> None:
    result = run(traces, "azure", "--model", "none", "--every", "2", "--requests", "3")
    assert result["runs"]["served"][0]["output_tokens"] == 24 + 6 + 18


def test_static_batching_without_a_model(traces: pathlib.Path) -> None:
    result = run(traces, "azure", "--model", "none", "--compare", "static")
    bound = BatchingBound.of(OUTPUTS, 2)
    assert (result["bound"], result["bound_of_a_run_that_ends"]) == (bound.ratio, bound.ratio_here)
    assert 0.85 < result["share_of_a_run_that_ends"] <= 1.05
    assert result["runs"]["static"][0]["steps"] >= bound.static_steps


def test_cache_without_a_model(traces: pathlib.Path) -> None:
    arguments = ("mooncake", "--model", "none", "--compare", "cache", "--pool-share", "0.8", "--page-size", "64")
    result = run(traces, *arguments, "--outstanding", "1")
    read = trace.read(trace.parse([*arguments, "--traces", str(traces)]), None, 512)
    ideal = lru_hits(read, 64, result["pool_pages"])
    assert result["lru"]["hits"] == ideal.hits > 0
    assert result["verdict"]["figure"] == pytest.approx(1.0, abs=0.1)


def test_settings_reach_the_engine(traces: pathlib.Path) -> None:
    result = run(traces, "mooncake", "--model", "none", "--set", "enable_prefix_caching=false")
    assert result["runs"]["served"][0]["prefix_hit_tokens"] == 0
    assert run(traces, "mooncake", "--model", "none")["runs"]["served"][0]["prefix_hit_tokens"] > 0


def test_what_cannot_be_measured_is_one_sentence(traces: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.main(["azure", "--traces", str(traces / "nowhere"), "--model", "none"]) == 2
    assert "there is no" in capsys.readouterr().err
    arguments = ["azure", "--traces", str(traces), "--model", "none", "--page-size", "48"]
    assert trace.main(arguments) == 2
    assert "page_size = 48 must be a power of two" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        trace.main(["azure", "--set", "page_sise=16"])
    assert "'page_sise' is none of" in capsys.readouterr().err


@pytest.mark.slow
def test_with_a_model(traces: pathlib.Path, tiny: pathlib.Path) -> None:
    small = ("--model", str(tiny), "--set", "prefill_sizes=[16]")
    result = run(traces, "mooncake", *small, "--block-tokens", "16", "--speed", "100")
    (figures,) = result["runs"]["served"]
    assert figures["prefix_hit_rate"] > 0.3
    assert figures["ttft"]["p50"] > 0
    assert result["outstanding"] is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["static", "exactness", "async", "multi-step"])
def test_comparisons_with_a_model(traces: pathlib.Path, tiny: pathlib.Path, mode: str) -> None:
    result = run(traces, "azure", "--model", str(tiny), "--set", "prefill_sizes=[16]", "--compare", mode)
    assert result["ratio"]["median"] > 0
    for name, runs in result["runs"].items():
        assert runs[0]["output_tokens"] == (12 if name == "prompts alone" else sum(OUTPUTS))


@pytest.mark.slow
def test_a_warm_prefix_with_a_model(traces: pathlib.Path, tiny: pathlib.Path) -> None:
    result = run(
        traces,
        "azure",
        "--model",
        str(tiny),
        "--set",
        "prefill_sizes=[16]",
        "--compare",
        "prefix",
        "--prefix-len",
        "96",
    )
    assert min(result["ttft"]["cold"], result["ttft"]["warm"], result["ratio"]["median"]) > 0
