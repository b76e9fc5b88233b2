"""benchmarks/vs_peers.py: its arithmetic by hand, the whole command with fake peers, and with jaxinfer only."""

import json
import pathlib
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from benchmarks import vs_peers
from benchmarks.peers import report
from benchmarks.peers.checkpoint import read_tensors, to_bfloat16
from benchmarks.peers.environment import CannotRun, Programs
from benchmarks.peers.gguf_layout import gguf_name, rotate_pairs, unsupported
from benchmarks.peers.goals import goal_for
from benchmarks.peers.measure import Agreement, TooShort, decode_rate, prefill_rate
from benchmarks.peers.random_model import write
from benchmarks.peers.session import Cell, Phase, Samples, Taken
from benchmarks.peers.work import Work
from benchmarks.peers.worker import PeerDied, Worker

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def fake(rate: float, trait: str = "") -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.benchmarks.fake_peer", str(rate), trait)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write(folder, TINY)
    return folder


@pytest.fixture
def options(tiny: pathlib.Path, tmp_path: pathlib.Path) -> list[str]:
    """Return the options of a small run that writes only to its own folders."""
    sizes = ["--prompt-len", "20", "--decode-prompt-len", "10", "--new-tokens", "8", "--rounds", "2"]
    places = ["--work-dir", str(tmp_path / "work"), "--out", str(tmp_path / "out.json"), "--check-model", str(tiny)]
    return ["--models", str(tiny), "--dtypes", "float32", "--batches", "1", "--first", "", *sizes, *places]


def measured(options: list[str], transformers: tuple[str, ...], llama_cpp: tuple[str, ...]) -> dict:
    peers = {"jaxinfer": fake(300.0), "transformers": transformers, "llama.cpp": llama_cpp}
    return vs_peers.measure(vs_peers.parse(options), Programs(peers, write_gguf=("true",)), {})


def test_rates_of_sequences_that_start_one_after_the_other() -> None:
    reply = {"times": [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]]}
    assert prefill_rate(reply, prompt_len=30) == 2 * 30 / 3.0
    assert decode_rate(reply) == (3 + 3) / (6.0 - 3.0)  # tokens received in (3, 6]


def test_a_run_without_steady_state_is_refused() -> None:
    with pytest.raises(TooShort, match="only 2 of 6"):
        decode_rate({"times": [[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]]})


def test_agreement_finds_the_first_difference() -> None:
    assert Agreement.of([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]) == Agreement(1, 2, 1)
    assert Agreement.of([[1]], [[1]]) == Agreement(1, 1, None)


def test_work_by_hand(tiny: pathlib.Path) -> None:
    attention = 16 * (4 + 2 + 2) * 4 + 4 * 4 * 16
    layers = 2 * (attention + 3 * 16 * 24 + 2 * 16) + 16
    work = Work.of(tiny)
    assert (work.layers, work.head, work.kv, work.scores) == (layers, 50 * 16, 2 * 2 * 2 * 4, 2 * 4 * 4)
    assert work.decode_bytes(batch=3, context=10, dtype="bfloat16") == 2 * (layers + 800 + 3 * 10 * 32)
    # two tokens: each through the layers; three (query, key) pairs, a product for the score and one for the sum
    assert work.prefill_flops(batch=1, length=2) == 2 * 2 * layers + 3 * 2 * 2 * 32 + 2 * 800


@pytest.mark.parametrize(
    ("row", "goal", "floor"),
    [
        (("transformers", "decode", "float32", 1, 128), 2.5, 2.0),
        (("transformers", "decode", "float32", 8, 128), 1.5, 1.2),
        (("transformers", "decode", "bfloat16", 1, 128), 1.5, 1.2),
        (("transformers", "decode", "bfloat16", None, 128), 1.3, None),
        (("transformers", "prefill", "float32", 32, 128), 1.2, 1.1),
        (("transformers", "prefill", "bfloat16", 1, 512), 1.0, 0.85),
        (("transformers", "prefill", "bfloat16", None, 64), 1.0, None),
        (("llama.cpp", "prefill", "bfloat16", None, 8), 0.7, None),
        (("llama.cpp", "decode", "bfloat16", None, 128), 0.9, None),
        (("llama.cpp", "decode", "float32", 1, 128), 0.9, None),
        (("llama.cpp", "decode", "bfloat16", 8, 128), 0.9, None),
        (("llama.cpp", "decode", "float32", 32, 128), 0.8, None),
    ],
)
def test_goals(row: tuple[str, str, str, int | None, int], goal: float, floor: float | None) -> None:
    found = goal_for(*row)
    assert found is not None
    assert (found.goal, found.floor) == (goal, floor)
    assert found.verdict(goal) == "goal"
    assert found.verdict(goal - 0.01) == ("floor" if floor else "below goal")
    assert floor is None or found.verdict(floor - 0.01) == "below floor"


def test_ratios_and_verdicts_of_made_up_peers(options: list[str]) -> None:
    result = measured(options, transformers=fake(100.0), llama_cpp=fake(600.0))
    prefill, decode = result["rows"]
    assert prefill["tokens_per_second"]["jaxinfer"]["median"] == pytest.approx(3000.0)
    assert decode["tokens_per_second"]["jaxinfer"] == pytest.approx({"median": 300.0, "min": 300.0, "max": 300.0})
    assert decode["ratio"]["transformers"]["median"] == pytest.approx(3.0)
    assert decode["ratio"]["llama.cpp"]["median"] == pytest.approx(0.5)
    assert [decode["ratio"][peer]["verdict"] for peer in ("transformers", "llama.cpp")] == ["goal", "below goal"]
    assert prefill["ratio"]["llama.cpp"]["verdict"] is None
    assert decode["same_tokens"]["llama.cpp"] == {"equal": 1, "sequences": 1, "first_difference": None}
    assert report.summary(result["rows"]).startswith("2 of 3 comparisons reach their goal\nBELOW GOAL:")


def test_shares_use_the_best_limit_that_any_peer_measured(options: list[str], tiny: pathlib.Path) -> None:
    result = measured(options, transformers=fake(100.0), llama_cpp=fake(600.0))
    prefill, decode = result["rows"]
    work = Work.of(tiny)
    assert [row["limits"] for row in result["rows"]] == [{"bandwidth": 6e8, "gemm": 1e9}] * 2
    assert decode["of_limit"]["jaxinfer"] == pytest.approx(300.0 * work.decode_bytes(1, 10 + 4, "float32") / 6e8)
    assert prefill["of_limit"]["jaxinfer"] == pytest.approx(3000.0 / 20 * work.prefill_flops(1, 20) / 1e9)


def test_rows_of_default_settings(options: list[str]) -> None:
    result = measured([*options, "--first", "8,100"], transformers=fake(100.0), llama_cpp=fake(600.0))
    rows = [(row["settings"], row["phase"], row["prompt_len"]) for row in result["rows"]]
    default = [("default", "prefill", 8), ("default", "prefill", 100), ("default", "decode", 10)]
    assert rows == [*default, ("batch", "prefill", 20), ("batch", "decode", 10)]
    verdicts = [row["ratio"]["llama.cpp"]["verdict"] for row in result["rows"][:3]]
    assert verdicts == ["below goal", None, "below goal"]
    table = report.table(result["rows"], ["jaxinfer", "transformers", "llama.cpp"]).split("\n")
    assert [line.split(" | ")[2] for line in table[2:]] == [*["default"] * 3, "1", "1"]


def test_a_noisy_row_is_flagged(options: list[str]) -> None:
    (cell,) = [Cell("tiny", pathlib.Path(options[1]), 50, "float32", 1)]
    phase, steady, shaky = Phase("decode", 10, 8), Samples([9.0, 10.0, 11.0], [1.0] * 3), Samples([8.0, 10.0, 11.0])
    for samples, others, noisy in ((steady, 0.02, False), (steady, 0.04, True), (shaky, 0.0, True)):
        taken = Taken(phase, {"jaxinfer": steady, "transformers": samples}, {})
        row = report.row(cell, taken, None, others)
        assert (row["noise"] is not None) == noisy
        assert (row["noise"] or "").startswith("transformers" if samples is shaky else "others" if noisy else "")


def test_a_peer_that_dies_is_absent_with_its_reason_and_comes_back(options: list[str]) -> None:
    result = measured([*options, "--batches", "2,1"], transformers=fake(100.0, "dies"), llama_cpp=("false",))
    rows = {item["batch"]: item for item in result["rows"] if item["phase"] == "decode"}
    assert "no room for two" in rows[2]["absent"]["transformers"]
    assert list(rows[1]["ratio"]) == ["transformers"]
    assert "exit status 1" in result["absent"]["llama.cpp"]
    table = report.table(result["rows"], ["jaxinfer", "transformers", "llama.cpp"]).split("\n")
    assert len(table) == 2 + 4
    assert len({line.count("|") for line in table}) == 1


def test_no_figures_when_peers_disagree(options: list[str]) -> None:
    with pytest.raises(CannotRun, match=r"llama\.cpp and jaxinfer differ in float32: .*token 0"):
        measured(options, transformers=fake(100.0), llama_cpp=fake(100.0, "differs"))


def test_a_peer_between_requests_uses_no_cpu(tmp_path: pathlib.Path) -> None:
    worker = Worker("spinner", fake(1.0, "spins"), tmp_path / "log")
    try:
        time.sleep(0.5)
        worker.ask("limits", dtype="float32", megabytes=1, side=1)
        assert worker.used_cpu_seconds > 0.0
        assert worker.idle_cpu_seconds <= 0.05
    finally:
        worker.close()


def test_a_silent_peer_is_given_up(tmp_path: pathlib.Path) -> None:
    with pytest.raises(PeerDied, match="no reply within"):
        Worker("sleeper", ("sleep", "60"), tmp_path / "log", seconds=0.1)


def test_prompts_beyond_the_context_are_refused(options: list[str]) -> None:
    with pytest.raises(CannotRun, match="201 tokens are beyond its context of 128"):
        measured([*options, "--prompt-len", "200"], transformers=fake(1.0), llama_cpp=fake(1.0))


@pytest.mark.slow
def test_jaxinfer_alone(options: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vs_peers.main([*options, "--peers", "jaxinfer", "--rounds", "1", "--quick"]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(item["phase"], item["batch"]) for item in result["rows"]] == [("prefill", 1), ("decode", 1)]
    assert all(item["tokens_per_second"]["jaxinfer"]["median"] > 0 for item in result["rows"])
    assert all(0 < item["of_limit"]["jaxinfer"] < 1 for item in result["rows"])
    assert "tiny | float32 | 1 | decode 10+8 |" in capsys.readouterr().out


def test_rotated_pairs_are_rotated_halves() -> None:
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    weight = np.random.default_rng(0).standard_normal((2 * 6, 5))
    halves = weight.reshape(2, 2, 3, 5)
    pairs = rotate_pairs("model.layers.0.self_attn.q_proj.weight", weight, config).reshape(2, 3, 2, 5)
    for part in (0, 1):  # of dimension i's pair: (i, i + 3) in halves, (2i, 2i + 1) in pairs
        np.testing.assert_array_equal(pairs[:, :, part], halves[:, part])
    assert rotate_pairs("model.layers.0.self_attn.v_proj.weight", weight, config) is weight


def test_gguf_names(tiny: pathlib.Path) -> None:
    names = {gguf_name(name) for name, _ in read_tensors(tiny)}
    assert len(names) == 3 + 2 * 9
    assert {"token_embd.weight", "output_norm.weight", "blk.1.attn_output.weight", "blk.0.ffn_norm.weight"} <= names


def test_what_the_gguf_writer_does_not_know_is_refused() -> None:
    assert unsupported(TINY) is None
    assert "qwen3" in str(unsupported({"model_type": "qwen3"}))
    assert "llama3" in str(unsupported({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}))
    assert "biases" in str(unsupported({"model_type": "llama", "attention_bias": True}))


def test_bfloat16_rounds_as_everybody_does() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    values[:2] = [1 + 2**-8, 1 + 3 * 2**-8]  # ties
    np.testing.assert_array_equal(to_bfloat16(values), values.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_figures_that_others_disturbed_are_not_kept(
    options: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vs_peers, "RESULTS", tmp_path / "results")
    result = measured(options, transformers=fake(100.0), llama_cpp=fake(600.0))
    unnamed = vs_peers.parse([word for word in options if word not in ("--out", str(tmp_path / "out.json"))])
    result["seconds"] = 100.0
    noises = ("others used 50%", None), (None, None), (None, None)
    for noise, idle, said, kept in zip(
        noises, (0.0, 2.0, 0.5), ("NOT QUIET", "NOT FAIR", "kept in"), (0, 0, 1), strict=True
    ):
        for row, why in zip(result["rows"], noise, strict=True):
            row["noise"] = why
        result["idle_cpu_seconds"] = {"transformers": idle}
        vs_peers.show(result, unnamed)
        assert said in capsys.readouterr().out
        assert len(list(tmp_path.glob("results/*.json"))) == kept
