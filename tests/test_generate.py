"""`python -m jaxinfer.generate` as used from a terminal."""

import io
import json
import pathlib
import re
import shutil
import subprocess
import sys

import jax.numpy as jnp
import pytest

from jaxinfer.compilations import cache
from jaxinfer.config import EngineConfig
from jaxinfer.generate import main
from jaxinfer.loading import load_model
from jaxinfer.opening import model_folder
from jaxinfer.sampling_params import RequestError

SMALL = ["--max-model-len", "128", "--max-num-seqs", "4"]  # one shape for all tests, so that programs are compiled once
FAST = [*SMALL, "--temperature", "0", "--max-tokens", "12"]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a copy of the demo draft model for tests that corrupt it."""
    return pathlib.Path(shutil.copytree(model_folder("demo-draft"), tmp_path / "model"))


def run(capsys, *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_other_ways_give_the_same_text(capsys):
    streamed = run(capsys, "--model", "demo-draft", "--prompt", "ROMEO:", *FAST)
    assert streamed.startswith("ROMEO:")
    assert len(streamed) > len("ROMEO:\n")
    modes = ["--async-scheduling", "off", "--batching", "static", "--no-enable-prefix-caching", "--swap-space-gib", "0"]
    for ways in (["--no-stream"], modes):
        assert run(capsys, "--model", "demo-draft", "--prompt", "ROMEO:", *FAST, *ways) == streamed


def test_json_gives_one_object_a_prompt(capsys):
    out = run(
        capsys,
        "--model",
        "demo-draft",
        "--prompt",
        "A",
        "--prompt",
        "B",
        "--n",
        "2",
        "--json",
        "--logprobs",
        "2",
        *FAST,
    )
    first, second = (json.loads(line) for line in out.splitlines())
    assert (first["prompt"], second["prompt"]) == ("A", "B")
    for output in (first, second):
        assert [sample["index"] for sample in output["outputs"]] == [0, 1]
        for sample in output["outputs"]:
            assert len(sample["logprobs"]) == len(sample["token_ids"])
            assert sample["finish_reason"] in ("length", "stop")
            assert {"token_id", "logprob", "rank", "decoded_token"} == sample["logprobs"][0][0].keys()


def test_json_says_where_drafts_were_not_kept_exactly(capsys):
    flags = ["--model", "demo-draft", "--prompt", "A", "--json", *FAST]
    (plain,) = json.loads(run(capsys, *flags))["outputs"]
    assert plain["acceptance"] is None
    lossy = ["--speculative", "ngram", "--speculation-acceptance", "typical"]
    (told,) = json.loads(run(capsys, *flags, *lossy))["outputs"]
    assert told["acceptance"] == "typical"


def test_engine_flags_reach_the_engine(monkeypatch):
    seen = {}

    def make(model, dtype, *, family, config, check_finite, chat_template, compilation_cache_dir):
        seen.update(model=model, family=family, config=config, cache=compilation_cache_dir)
        raise RequestError(None, "enough")

    monkeypatch.setattr("jaxinfer.terminal.start.LLM", make)
    flags = [
        "--page-size",
        "16",
        "--no-enable-prefix-caching",
        "--async-scheduling",
        "off",
        "--memory-utilization",
        "0.5",
    ]
    flags += ["--compilation-cache-dir", "", "--family", "a:B"]
    assert main(["--model", "demo-draft", "--prompt", "A", "--prompt", "B", *flags]) == 2
    assert seen == {
        "family": "a:B",
        "model": "demo-draft",
        "cache": "",
        "config": EngineConfig(
            max_num_seqs=2,
            page_size=16,
            enable_prefix_caching=False,
            async_scheduling=False,
            memory_utilization=0.5,
        ),
    }


def test_a_prompt_may_come_from_a_file_or_be_piped_in(capsys, tmp_path, monkeypatch):
    prompt = "Fünf Wörter: "
    from_flag = run(capsys, "--model", "demo-draft", "--prompt", prompt, *FAST)
    assert from_flag.startswith(prompt)
    path = tmp_path / "prompt.txt"
    path.write_text(prompt, encoding="utf-8")
    assert run(capsys, "--model", "demo-draft", "--prompt-file", str(path), *FAST) == from_flag
    for asked, end in ((["--model", "demo-draft", "--prompt-file", "-"], ""), (["demo-draft"], "\n")):
        monkeypatch.setattr("sys.stdin", io.StringIO(prompt + end))
        assert run(capsys, *asked, *FAST) == from_flag


def test_what_is_piped_in_is_utf8_whatever_the_locale(capsys, monkeypatch):
    raw = io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", raw)
    assert main(["demo-draft", *FAST]) == 2
    assert "standard input is not UTF-8" in capsys.readouterr().err


def test_without_a_prompt_there_is_no_other_one(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["demo-draft", *FAST]) == 2
    assert capsys.readouterr().err.startswith("error: no prompt, and nothing on standard input: give --prompt TEXT")


def test_several_samples_are_numbered_and_the_seed_makes_them_again(capsys):
    flags = ["demo-draft", "--prompt", "A", "--n", "2", *SMALL, "--max-tokens", "8"]
    assert main([*flags, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("[1/2]\nA")
    assert out.count("[2/2]\nA") == 1
    seed = re.search(r"^seeds +(\d+)$", err, re.MULTILINE)[1]
    assert run(capsys, *flags, "--seed", seed) == out


def test_stats_tell_what_the_engine_did(capsys):
    prompt = "First Citizen: speak, speak. First Citizen: speak, speak. First"
    words = ["--prompt", prompt, *SMALL, "--max-tokens", "60", "--temperature", "0"]
    assert main(["--model", "demo-draft", "--speculative", "ngram", "--stats", *words]) == 0
    printed = capsys.readouterr().err
    accepted, proposed = map(int, re.search(r"draft tokens +(\d+) of (\d+) accepted", printed).groups())
    assert 0 < accepted <= proposed
    assert "preemptions" not in printed


def test_stats_go_to_stderr(capsys):
    assert main(["--model", "demo-draft", "--prompt", "A", "--stats", *FAST]) == 0
    captured = capsys.readouterr()
    for word in ("TTFT", "TPOT", "tokens/s", "memory bandwidth"):
        assert word in captured.err
        assert word not in captured.out


def test_logprobs_are_printed(capsys):
    out = run(capsys, "--model", "demo-draft", "--prompt", "A", "--logprobs", "2", *FAST)
    assert len([line for line in out.splitlines() if line.count("'") >= 4 or line.count('"') >= 2]) >= 1


def test_a_conversation_remembers(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Who art thou?\nAnd why?\n"))
    seen = []
    model = load_model("demo-draft")
    render = type(model.chat_template).render
    monkeypatch.setattr(
        type(model.chat_template),
        "render",
        lambda self, messages, *rest, **k: seen.append(list(messages)) or render(self, messages, *rest, **k),
    )
    assert main(["--model", "demo-draft", "--chat", *FAST]) == 0
    assert [[m["role"] for m in messages] for messages in seen] == [["user"], ["user", "assistant", "user"]]
    first_reply = seen[1][1]["content"]
    assert first_reply
    assert capsys.readouterr().out.startswith(f"{first_reply}\n")


def break_missing_config(folder):
    (folder / "config.json").unlink()


def break_missing_weights(folder):
    (folder / "model.safetensors").unlink()


def break_missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def break_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def break_lying_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def edit_config(**changes):
    def spoil(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (break_missing_config, ["config.json"]),
        (break_missing_weights, ["safetensors"]),
        (break_missing_tokenizer, ["tokenizer"]),
        (break_truncated_weights, ["model.safetensors"]),
        (break_lying_header, ["model.safetensors"]),
        (edit_config(architectures=["BertModel"]), ["BertModel", "LlamaForCausalLM", "docs/models.md"]),
        (edit_config(architectures=None), ["architectures"]),
        (edit_config(hidden_size=0), ["hidden_size", "0"]),
        (edit_config(hidden_size="wide"), ["hidden_size", "wide"]),
        (edit_config(num_key_value_heads=3), ["num_key_value_heads", "3"]),
        (edit_config(intermediate_size=100), ["mlp", "100"]),
        (edit_config(hidden_act="mish"), ["hidden_act", "mish"]),
        (edit_config(rope_scaling={"rope_type": "magic"}), ["rope_type", "magic"]),
        (edit_config(quantization_config={"quant_method": "magic"}), ["magic", "gptq", "awq"]),
    ],
)
def test_a_bad_folder_is_one_sentence_and_exit_code_2(capsys, folder, spoil, words):
    spoil(folder)
    assert main(["--model", str(folder), "--prompt", "A", *FAST]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--max-tokens", "0"], ["max_tokens", "0"]),
        (["--logprobs", "1000"], ["logprobs", "1000"]),
        (["--max-model-len", "100000"], ["max_model_len", "100000"]),
        (["--scheduling-policy", "lifo"], ["scheduling_policy", "lifo", "fcfs"]),
        (["--num-pages", "1000000000"], ["num_pages", "1000000000", "GiB", "memory_utilization"]),
        (["--prompt-file", "no/such/file"], ["no/such/file"]),
        (["--tokenizer", "x"], ["--tokenizer is not a flag of jaxinfer generate"]),
        (["--kv-cache-bytes", "1000"], ["kv_cache_bytes = 1000 holds 0 of the 2 pages", "set "]),
        (["--memory-utilization", "0.000001"], ["1e-06 x", "it fits with memory_utilization = 0.01"]),
        (["--model", "no/such/folder/at/all"], ["no/such/folder/at/all"]),
    ],
)
def test_bad_arguments_are_one_sentence_and_exit_code_2(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr("sys.stdin", io.StringIO("A"))
    assert main(["demo-draft", *SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    error = captured.err.strip()
    assert captured.out == ""
    assert len(error.splitlines()) == 1
    for word in words:
        assert word in error


def test_nan_weights_are_found_on_request(capsys, folder):
    from jaxinfer.models.registry import family_for
    from jaxinfer.weights import save_params

    model = load_model(str(folder))
    params = {**model.params, "final_norm": {"scale": model.params["final_norm"]["scale"].at[3].set(jnp.nan)}}
    config_json = json.loads((folder / "config.json").read_text())
    family = family_for(config_json)
    save_params(folder, params, family.param_specs(family.config(config_json)), config_json)
    assert main(["--model", str(folder), "--prompt", "A", "--check-finite", *FAST]) == 2
    assert "model.norm.weight" in capsys.readouterr().err


def test_as_a_program():
    command = [sys.executable, "-m", "jaxinfer.generate", "--model", "demo-draft", "--prompt", "KING", *FAST]
    command += ["--compilation-cache-dir", str(cache.DEFAULT_FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("KING")
