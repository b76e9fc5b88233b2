"""Perplexity against transformers' golden logits in float64 and the sliding-window loop of its documentation."""

from __future__ import annotations

import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.eval.__main__ import main
from jaxinfer.eval.perplexity import Window, measure, windows
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import RequestError
from tests.models.parity import load_case
from tests.quantize.models import GOLDENS
from tools.oracle.golden import Golden, load


@pytest.fixture(scope="module")
def golden() -> Golden:
    return load(GOLDENS / "llama-mha")


@pytest.fixture(scope="module")
def model(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_case(golden, tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def llm(model: Model) -> LLM:
    return LLM(model, max_num_seqs=2, max_model_len=64, show_progress=False)


def losses_of(logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Return the negative log likelihood of each token except the first, in float64."""
    logits = np.asarray(logits, np.float64)[: len(tokens) - 1]
    top = logits.max(-1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return -logprobs[np.arange(len(tokens) - 1), tokens[1:]]


def test_of_one_window_it_is_that_of_transformers(golden: Golden, llm: LLM) -> None:
    want = losses_of(golden.prefill, golden.prompt).mean()
    found = measure(llm, golden.prompt, len(golden.prompt), len(golden.prompt))
    assert found.loss == pytest.approx(want, abs=2e-6)
    assert found.perplexity == pytest.approx(math.exp(want), rel=2e-6)
    assert (found.scored, found.windows) == (len(golden.prompt) - 1, 1)


@pytest.mark.parametrize(("length", "stride"), [(16, 8), (16, 16), (16, 5), (17, 1), (40, 13)])
def test_over_windows_it_is_that_of_the_page(length: int, stride: int, model: Model, llm: LLM) -> None:
    """The loop masks labels of an earlier window and shifts them by one; the mean is over labels."""
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 50).tolist()
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + length, len(tokens))
        ids, labels = tokens[begin:end], np.array(tokens[begin:end])
        labels[: -(end - before)] = -100
        each = losses_of(np.asarray(model.apply(model.params, jnp.asarray([ids]))[0]), ids)
        valid = labels[1:] != -100
        total, count = total + each[valid].sum(), count + int(valid.sum())
        before = end
        if end == len(tokens):
            break
    found = measure(llm, tokens, length, stride)
    assert found.scored == count
    assert found.loss == pytest.approx(total / count, abs=2e-6)


def test_each_token_but_the_first_counts_once() -> None:
    assert list(windows(10, 4, 2)) == [Window(0, 4, 3), Window(2, 6, 2), Window(4, 8, 2), Window(6, 10, 2)]
    assert list(windows(9, 4, 4)) == [Window(0, 4, 3), Window(4, 8, 3), Window(8, 9, 0)]
    assert list(windows(3, 4, 2)) == [Window(0, 3, 2)]


@pytest.mark.parametrize(
    ("count", "length", "stride", "words"),
    [
        (50, 64, 8, "max_length=64 must be from 2 to 63"),
        (50, 1, 1, "max_length=1 must be from 2"),
        (50, 16, 0, "stride=0 must be from 1 to max_length=16"),
        (50, 16, 17, "stride=17 must be from 1"),
        (1, 16, 8, "a text of 1 tokens has no perplexity"),
    ],
)
def test_what_cannot_be_measured_is_refused(count: int, length: int, stride: int, words: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=words):
        measure(llm, [1] * count, length, stride)


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ROMEO:\nBut, soft! what light through yonder window breaks?\n" * 2, encoding="utf-8")
    words = ["perplexity", str(text), "--model", "demo-draft", "--max-length", "16", "--max-model-len", "64"]
    assert main([*words, "--stride", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert (found["max_length"], found["stride"], found["model"]) == (16, 16, "demo-draft")
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("perplexity ")
    assert "windows of 16, stride 8" in shown


@pytest.mark.parametrize(
    ("file", "words", "sentence"),
    [
        ("absent.txt", [], "absent.txt cannot be read"),
        ("latin.txt", [], "latin.txt cannot be read: 'utf-8' codec"),
        ("fine.txt", ["--model", "/nowhere"], "no folder '/nowhere'"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    file: str, words: list[str], sentence: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    (tmp_path / "fine.txt").write_text("fine")
    assert main(["perplexity", str(tmp_path / file), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert sentence in line
