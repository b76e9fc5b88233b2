"""The tool that trains the demo models, on a generated text."""

import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.attention import causal_attend
from jaxinfer.loading import load_model
from jaxinfer.text import ChatTemplate
from jaxinfer.types import LayerSpec
from tools.train_demo import __main__ as tool
from tools.train_demo import corpus, folder
from tools.train_demo.attention import blocked_attend
from tools.train_demo.evaluate import Scorer, windows
from tools.train_demo.ngram import NGram
from tools.train_demo.recipes import DRAFT, Stage, quick
from tools.train_demo.training import build, dropped, schedule, train, training_loss

NAMES = ("ANNA", "BORIS", "CLARA")
WORDS = ("the", "king", "will", "come", "to", "our", "house", "and", "speak", "of", "love", "no", "more")
TINY = dataclasses.replace(quick(DRAFT), layers=1, vocab=320, stages=(Stage(4, 2, 16),), eval_every=1, dropout=0.2)


def play(speeches: int) -> str:
    rng = np.random.default_rng(0)
    turns = (f"{rng.choice(NAMES)}:\n{' '.join(rng.choice(WORDS, 12))}.\n\n" for _ in range(speeches))
    return "".join(turns)


@pytest.fixture(scope="module")
def text() -> str:
    return play(200)


@pytest.fixture(scope="module")
def data(text: str) -> corpus.Corpus:
    return corpus.corpus(corpus.train_tokenizer(text, TINY.vocab), text)


def run(data: corpus.Corpus, file: pathlib.Path, stop: int | None = None):
    """Train TINY; ``stop`` interrupts the run after that many evaluations."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) - 1 == stop:
            raise KeyboardInterrupt

    model = build(TINY, 7)
    return train(model, TINY, data, 7, lambda params, length: 1.0 / (1 + len(lines)), file, say), lines


@pytest.mark.slow
def test_quick_run_writes_a_folder_that_loads(tmp_path, capsys):
    source = tmp_path / "text" / "tinyshakespeare" / "input.txt"
    source.parent.mkdir(parents=True)
    source.write_text(play(400))
    paths = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--work-dir", str(tmp_path / "work")]
    assert tool.main([*paths, "--quick", "--only", "draft"]) == 0
    printed = capsys.readouterr().out
    assert "draft step 6/6" in printed
    measures = json.loads(printed[printed.index("{\n") :])["draft"]
    model = load_model(str(tmp_path / "out" / "draft"), show_progress=False)
    ids = model.tokenizer.encode("ANNA:\nno more")
    logits = model.apply(model.params, jnp.asarray([ids]))
    assert model.dtype == jnp.bfloat16
    assert logits.shape == (1, len(ids), 512)
    assert 4.0 < measures["test"]["nats_per_token"] < math.log(512)  # six steps: better than the uniform distribution


def test_missing_data_is_one_sentence(tmp_path, capsys):
    assert tool.main(["--data", str(tmp_path)]) == 2
    assert "input.txt is missing" in capsys.readouterr().err


def test_an_interrupted_run_ends_as_if_it_had_not_been(data, tmp_path):
    whole, _ = run(data, tmp_path / "whole.npz")
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "parts.npz", stop=2)
    parts, lines = run(data, tmp_path / "parts.npz")
    assert "goes on from step 2" in lines[0]
    assert parts.step == whole.step == 4
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), parts.params, whole.params)))


def test_first_weights_have_a_variance_of_one_by_their_inputs():
    layer = build(dataclasses.replace(TINY, hidden=64, intermediate=48), 0).params["layers_0"]
    inputs = {"qkv": 64, "out": 64, "gate_up": 64, "down": 48}
    matrices = {**layer["attention"], **layer["mlp"]}
    assert matrices.keys() == inputs.keys()
    for name, size in inputs.items():
        residual = 2**-0.5 if name in ("out", "down") else 1.0
        assert float(matrices[name].std()) == pytest.approx(residual * size**-0.5, rel=0.1), name


def test_another_recipe_does_not_go_on_from_this_ones_checkpoint():
    other = dataclasses.replace(TINY, weight_decay=0.2)
    assert len({tool.checkpoint_name(TINY, 0), tool.checkpoint_name(TINY, 1), tool.checkpoint_name(other, 0)}) == 3


def test_best_parameters_are_chosen_anew_when_windows_grow(data, tmp_path):
    losses = iter([3.0, 1.0, 9.0, 8.0])
    seen = []

    def validate(params, length):
        seen.append((length, params))
        return next(losses)

    recipe = dataclasses.replace(TINY, stages=(Stage(2, 2, 16), Stage(2, 2, 24)))
    progress = train(build(recipe, 0), recipe, data, 0, validate, tmp_path / "x.npz", lambda line: None)
    assert [length for length, _ in seen] == [16, 16, 24, 24]
    assert progress.best_loss == 8.0
    assert progress.best is seen[3][1]


def test_split_is_by_position_and_complete():
    text = "".join(chr(33 + index % 90) for index in range(1000))
    split = corpus.Split.of(text)
    assert split.train + split.validation + split.test == text
    assert [len(split.train), len(split.validation), len(split.test)] == [900, 50, 50]


@pytest.mark.parametrize("sample", ["ANNA:\nno more", "\u00e9t\u00e9 \U0001f600 \ud55c\uad6d\uc5b4\n\n\t end  "])
def test_tokenizer_encodes_every_text(data, sample):
    ids = data.tokenizer.encode(sample).ids
    assert ids[0] == 0
    assert data.tokenizer.decode(ids[1:]) == sample


def test_windows_start_with_bos_and_depend_on_seed_and_step_alone(data):
    first = corpus.batch(data, 3, 5, 16, 20)
    assert first.shape == (16, 21)
    assert (first[:, 0] == 0).all()
    assert (first == corpus.batch(data, 3, 5, 16, 20)).all()
    assert (first != corpus.batch(data, 3, 6, 16, 20)).any()


def test_dialogues_read_as_the_chat_template_renders(data):
    rows = corpus.batch(data, 0, 0, 64, 60)
    texts = [data.tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in rows]
    chats = [text for text in texts if "<|assistant|>" in text]
    assert 2 <= len(chats) <= 20
    roles = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
    turns = chats[0].removeprefix("<|bos|>").split("<|eos|>")[:-1]
    messages = [
        {"role": role, "content": turn.removeprefix(mark)}
        for turn in turns
        for role, mark in roles.items()
        if turn.startswith(mark)
    ]
    assert len(messages) == len(turns) >= 2
    template = ChatTemplate(folder.CHAT_TEMPLATE, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
    rendered = template.render(messages, add_generation_prompt=False)
    assert chats[0].startswith(rendered)
    assert template.render(messages[:1], add_generation_prompt=True).endswith("<|eos|><|assistant|>")


def test_blocked_attention_is_causal_attention_also_for_its_gradient():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 200, heads, 8)) for key, heads in zip(keys, (4, 2, 2), strict=True))

    def total(attend):
        return lambda q, k, v: (attend(q, k, v, None, LayerSpec(), 0.3)[0] ** 2).sum()

    for blocked, plain in zip(
        jax.jit(jax.grad(total(blocked_attend), argnums=(0, 1, 2)))(q, k, v),
        jax.jit(jax.grad(total(causal_attend), argnums=(0, 1, 2)))(q, k, v),
        strict=True,
    ):
        np.testing.assert_allclose(blocked, plain, atol=2e-4)


def test_dropout_keeps_the_mean_and_drops_its_share():
    out = np.asarray(dropped(jnp.ones((400, 400)), jax.random.key(0), 0.25))
    assert (out == 0).mean() == pytest.approx(0.25, abs=0.01)
    assert out.mean() == pytest.approx(1.0, abs=0.01)


def test_dropout_reaches_the_blocks_and_zero_means_none(data):
    model = build(TINY, 0)
    cut = jnp.asarray(corpus.batch(data, 0, 0, 4, 16))
    keys = [jax.random.key(0), jax.random.key(1)]
    noisy = [float(training_loss(model.module, 0.3)(model.params, cut, key)) for key in keys]
    plain = [float(training_loss(model.module, 0.0)(model.params, cut, key)) for key in keys]
    assert noisy[0] != noisy[1]
    assert plain[0] == plain[1]
    scored = Scorer(model, 0).token_losses(model.params, np.asarray(cut)).mean()
    assert plain[0] == pytest.approx(scored, abs=1e-5)


def test_evaluation_scores_every_token_once(data):
    model, ids = build(TINY, 0), np.arange(5, 55, dtype=np.int32)
    cut = windows(ids, 0, 16)
    assert cut.shape == (4, 17)
    assert cut[:, 1:][cut[:, 1:] >= 0].tolist() == ids.tolist()
    result = Scorer(model, 0).held_out(model.params, ids, characters=100, length=16)
    assert result.bits_per_character == pytest.approx(result.nats_per_token * 50 / 100 / math.log(2))
    one = Scorer(model, 0).token_losses(model.params, cut[:1])
    logits = model.apply(model.params, jnp.asarray(cut[:1, :-1]))
    chosen = jax.nn.log_softmax(logits)[0, np.arange(16), cut[0, 1:]]
    np.testing.assert_allclose(one[0], -chosen, rtol=1e-5)


def test_positions_are_reported_apart():
    model = build(TINY, 0)
    ids = np.arange(300, dtype=np.int32) % 300
    result = Scorer(model, 0).held_out(model.params, ids, characters=300, length=200)
    assert list(result.by_position) == ["0-63", "64-127", "128-199"]


def test_learning_rate_rises_stays_and_falls_to_zero():
    recipe = dataclasses.replace(TINY, stages=(Stage(100, 1, 8),), warmup=10, decay=20, learning_rate=1.0)
    rate = [float(schedule(recipe)(step)) for step in (0, 5, 10, 50, 80, 90, 100)]
    assert rate == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("context", ["", "ab", "abra", "zzz", "cad"])
def test_ngram_probabilities_sum_to_one(context):
    model = NGram.train("abracadabra, abracadabra! abba cadabra", 4)
    bits = [model.bits_per_character(context + last) * (len(context) + 1) for last in model.alphabet + "?"]
    before = model.bits_per_character(context) * len(context) if context else 0.0
    assert sum(2 ** -(total - before) for total in bits) == pytest.approx(1.0)


def test_ngram_knows_a_repeated_text_and_improves_with_order(text):
    scores = [NGram.train(text, order).bits_per_character(text) for order in (1, 2, 4)]
    assert scores[0] > scores[1] > scores[2]
    assert scores[2] < 1.5
    counts = np.unique(list(text), return_counts=True)[1] / len(text)
    assert scores[0] == pytest.approx(-(counts * np.log2(counts)).sum(), rel=0.5)


@pytest.mark.parametrize("order", [0, 20])
def test_ngram_refuses_orders_it_cannot_number(order):
    with pytest.raises(ValueError, match=f"order {order}"):
        NGram.train("abc", order)
