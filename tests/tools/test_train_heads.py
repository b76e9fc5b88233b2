"""The tool that trains draft heads, for a tiny target on a generated text."""

import dataclasses
import json
import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxinfer.draft_heads import load_head
from jaxinfer.layers.attention import causal_attend
from jaxinfer.llm import LLM
from jaxinfer.models.head import shared
from jaxinfer.models.heads.eagle import MAP
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text import ChatTemplate
from tests.models.parity import GOLDENS, load_case
from tests.tools.test_train_demo import play
from tools.oracle.golden import load
from tools.train_demo import corpus, folder
from tools.train_demo.recipes import DRAFT
from tools.train_demo.recipes import quick as quick_model
from tools.train_demo.training import build as build_model
from tools.train_heads import __main__ as tool
from tools.train_heads import heads
from tools.train_heads.generated import prompts
from tools.train_heads.losses import guessed, measure, states
from tools.train_heads.recipes import RECIPES, HeadRecipe, quick
from tools.train_heads.texts import corpus_of
from tools.train_heads.training import Texts, train

METHODS = ("medusa", "eagle3")
WORDS = " ".join(
    f"w{word}" for word in np.random.default_rng(0).integers(1, 32, 6000)
)  # of tests.models.parity's tokenizer
TARGET = dataclasses.replace(quick_model(DRAFT), layers=4, vocab=320)
LENGTH = 24


@pytest.fixture(scope="module")
def learnt() -> corpus.Corpus:
    text = play(200)
    return corpus.corpus(corpus.train_tokenizer(text, TARGET.vocab), text)


@pytest.fixture(scope="module")
def target() -> Model:
    """Return a target with random weights, scaled so that its logits are far apart."""
    model = build_model(TARGET, 7).replace(name="tiny")
    return model.replace(params={**model.params, "embed": {"table": 12 * model.params["embed"]["table"]}})


@pytest.fixture(scope="module")
def texts(learnt: corpus.Corpus) -> Texts:
    """Return texts that the target might have written."""
    rows = {heat: corpus.batch(learnt, 1, step, 40, LENGTH - 1) for step, heat in enumerate((0.0, 1.0))}
    return Texts.of(rows, 4, learnt)


def head_for(method: str, target: Model, texts: Texts) -> tuple[HeadRecipe, Model, np.ndarray]:
    recipe = dataclasses.replace(quick(RECIPES[method]), guesses=3).fitted(target.config)
    tokens = heads.most_frequent(texts.written, target.config.vocab_size, recipe.draft_vocab)
    return recipe, heads.build(recipe, target, tokens, 3), tokens


def own(head: Model) -> Any:
    return {name: value for name, value in head.params.items() if name != MAP}


@pytest.mark.parametrize("count", [3, 9])
def test_turns_are_what_drafting_computes(target: Model, texts: Texts, count: int) -> None:
    """Training turns match drafting after the first ``count`` tokens, with the text's tokens as draft tokens."""
    _, head, tokens = head_for("eagle3", target, texts)
    rows = jnp.asarray(texts.written[:2])
    features, _ = states(target, head, rows)
    module: Any = head.module
    bound = {"params": {**head.params, **shared(target.params, head.config)}}
    entering, positions = (
        module.apply(bound, features, method="first"),
        jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)),
    )
    got = guessed(head, own(head), target, rows, 4)
    for turn, (ours, _) in enumerate(got):
        left, _ = module.apply(bound, jnp.roll(rows, -1, axis=1), entering, positions, causal_attend, None)
        place = count - 2 + turn
        entering = entering.at[:, place + 1].set(left[:, place])
        want = module.apply(bound, left[:, place], method="head")[:, tokens]
        np.testing.assert_allclose(ours[:, place - turn], want, atol=1e-5)


def test_guesses_are_compared_with_the_target_one_place_further_each(target: Model, texts: Texts) -> None:
    """Untrained Medusa heads give the target's next-token logits: for guess i that is i + 1 positions too early."""
    _, head, _ = head_for("medusa", target, texts)
    rows = jnp.asarray(texts.written[:2])
    logprobs = jax.nn.log_softmax(target(rows))
    for place, (ours, theirs) in enumerate(guessed(head, own(head), target, rows, 3)):
        assert ours.shape == theirs.shape == (2, LENGTH - 1 - place, TARGET.vocab)
        np.testing.assert_allclose(theirs, logprobs[:, 1 + place :], atol=1e-5)
        np.testing.assert_allclose(jax.nn.log_softmax(ours), logprobs[:, : ours.shape[1]], atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_loss_falls_and_an_interrupted_run_ends_as_if_it_had_not_been(
    method: str, target: Model, texts: Texts, tmp_path: pathlib.Path
) -> None:
    recipe, head, _ = head_for(method, target, texts)
    recipe = dataclasses.replace(recipe, steps=24, decay=8, eval_every=8, learning_rate=1e-2)
    lines: list[str] = []

    def stop(line: str) -> None:
        if len(lines) == 1:
            raise KeyboardInterrupt
        lines.append(line)

    whole = train(head, target, recipe, texts, 5, tmp_path / "whole.npz", lines.append)
    losses = [float(line.split("held-out ")[1].split(",")[0]) for line in lines]
    before = measure(head, own(head), target, jnp.asarray(texts.held_out[0.0]), recipe.guesses)
    assert losses[-1] < min(losses[0], float(before[0].mean())) - 0.1
    lines.clear()
    with pytest.raises(KeyboardInterrupt):
        train(head, target, recipe, texts, 5, tmp_path / "parts.npz", stop)
    lines.clear()
    parts = train(head, target, recipe, texts, 5, tmp_path / "parts.npz", lines.append)
    assert "goes on from step 8" in lines[0]
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), parts.params, whole.params)))


@pytest.mark.parametrize("method", METHODS)
def test_a_written_folder_loads_with_the_same_outputs(
    method: str, target: Model, texts: Texts, tmp_path: pathlib.Path
) -> None:
    recipe, head, _ = head_for(method, target, texts)
    heads.write(tmp_path, recipe, head, own(head), target)
    loaded = load_head(str(tmp_path), method, target, make_mesh())
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), own(head))
    assert jax.tree.structure(loaded.params) == jax.tree.structure(head.params)
    rows = jnp.asarray(texts.written[:2])
    want, got = guessed(head, rounded, target, rows, 3), guessed(loaded, own(loaded), target, rows, 3)
    for (ours, _), (theirs, _) in zip(want, got, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_vocabulary_is_stored_as_published(target: Model, texts: Texts, tmp_path: pathlib.Path) -> None:
    recipe, head, tokens = head_for("eagle3", target, texts)
    heads.write(tmp_path, recipe, head, own(head), target)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (np.int64, np.bool_)
    assert (np.arange(recipe.draft_vocab) + stored["d2t"]).tolist() == tokens.tolist()
    assert np.flatnonzero(stored["t2d"]).tolist() == tokens.tolist()
    counts = np.bincount(texts.written.reshape(-1), minlength=TARGET.vocab)
    assert counts[tokens].min() >= np.delete(counts, tokens).max()
    names = {"fc.weight", "norm.weight", "lm_head.weight", "midlayer.hidden_norm.weight", "midlayer.mlp.up_proj.weight"}
    assert names < stored.keys()
    assert "embed_tokens.weight" not in stored
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["draft_vocab_size"], config["eagle_aux_hidden_state_layer_ids"]) == (64, [0, 1, 2])


def test_medusa_heads_are_stored_as_published(target: Model, texts: Texts, tmp_path: pathlib.Path) -> None:
    recipe, head, _ = head_for("medusa", target, texts)
    heads.write(tmp_path, recipe, head, own(head), target)
    stored = safetensors.numpy.load_file(tmp_path / "medusa_lm_head.safetensors")
    parts = ("0.linear.weight", "0.linear.bias", "1.weight")
    assert stored.keys() == {f"{index}.{part}" for index in range(3) for part in parts}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["base_model_name_or_path"]) == (3, "tiny")


def test_batches_depend_on_seed_and_step_alone_and_some_are_long(texts: Texts) -> None:
    recipe = dataclasses.replace(quick(RECIPES["eagle3"]), join_every=3)
    assert (texts.batch(recipe, 3, 0) == texts.batch(recipe, 3, 0)).all()
    assert (texts.batch(recipe, 3, 0) != texts.batch(recipe, 3, 1)).any()
    assert texts.batch(recipe, 3, 1).shape == (recipe.rows, LENGTH)
    (joined,) = texts.batch(recipe, 3, 2)
    assert (len(joined), (joined == 0).sum(), joined[0]) == (recipe.rows * (LENGTH - 1) + 1, 1, 0)


def test_prompts_are_names_chats_and_pieces_of_the_text(learnt: corpus.Corpus) -> None:
    made = prompts(learnt, 0, 64, 20)
    assert made == prompts(learnt, 0, 64, 20)
    assert all(prompt[0] == 0 and 1 < len(prompt) <= 20 for prompt in made)
    texts = [learnt.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in made]
    assert sum("<|user|>" in text for text in texts) >= 8
    assert sum(text.removeprefix("<|bos|>") in ("ANNA:", "BORIS:", "CLARA:") for text in texts) >= 8


def test_another_recipe_does_not_go_on_from_this_ones_checkpoint() -> None:
    recipe = RECIPES["eagle3"]
    named = {(recipe, 0, "a"), (recipe, 1, "a"), (recipe, 0, "b"), (dataclasses.replace(recipe, rows=2), 0, "a")}
    assert len({tool.checkpoint_name(*each) for each in named}) == 4


def test_sizes_are_those_of_the_target_unless_asked() -> None:
    sizes = {
        (): (512, 1152),
        ("--target", "other"): (0, 0),
        ("--target", "other", "--draft-vocab", "7", "--intermediate", "9"): (9, 7),
    }
    for words, wanted in sizes.items():
        recipe = tool.recipe_of("eagle3", tool.arguments(words))
        assert (recipe.intermediate, recipe.draft_vocab) == wanted
    fitted = tool.recipe_of("eagle3", tool.arguments(["--target", "other"])).fitted(LARGE)
    assert (fitted.intermediate, fitted.draft_vocab) == (14_336, 32_000)


LARGE = types.SimpleNamespace(vocab_size=128_256, intermediate_size=14_336)


def test_a_text_without_the_demos_tokens_is_plain_and_asked_about_in_chats(tmp_path: pathlib.Path) -> None:
    model = load_case(load(GOLDENS / "cohere2-hub"), tmp_path)
    model = model.replace(chat_template=ChatTemplate("w7 {{ messages[0].content }} w9"))
    with pytest.raises(ValueError, match="the text has 100 tokens"):
        corpus_of(model, tmp_path, " ".join(WORDS.split()[:100]))
    data = corpus_of(model, tmp_path, WORDS)
    assert (data.speeches, data.begin) == ([], [])
    made = prompts(data, 0, 64, 20)
    assert made == prompts(data, 0, 64, 20)
    assert sum((prompt[0], prompt[-1], len(prompt)) == (7, 9, 8) for prompt in made) >= 8
    assert corpus.batch(data, 1, 2, 3, 9).shape == (3, 10)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), [("cohere2-hub", "eagle3"), ("gpt2-hub", "medusa")])
def test_heads_of_other_families_are_trained_and_served(family: str, method: str, tmp_path: pathlib.Path) -> None:
    """Families with other norms, positions and biases than the demo model's."""
    load_case(load(GOLDENS / family), tmp_path / "target")
    (tmp_path / "text").write_text(WORDS)
    paths = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "out"), "--work-dir", str(tmp_path / "work")]
    words = [*paths, "--method", method, "--target", str(tmp_path / "target"), "--quick"]
    assert tool.main(words) == 0
    settings: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 48, "speculative_adaptive": False}
    drafts = {"speculative": method, "speculative_model": str(tmp_path / "out" / method), "num_speculative_tokens": 2}
    params, found = SamplingParams(temperature=1.0, max_tokens=30, seed=1, ignore_eos=True), []
    for more in ({}, drafts):
        with LLM(str(tmp_path / "target"), "float32", show_progress=False, **settings, **more) as llm:
            found.append(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids)
            assert (llm.engine.stats().drafts > 5) == bool(more)
    assert found[0] == found[1]


def test_missing_data_is_one_sentence(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--data", str(tmp_path)]) == 2
    assert "input.txt is missing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_quick_run_writes_a_head_and_measures_it(
    method: str, learnt: corpus.Corpus, target: Model, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "text" / "tinyshakespeare" / "input.txt"
    source.parent.mkdir(parents=True)
    source.write_text(play(200))
    folder.write(tmp_path / "target", TARGET, target, target.params, learnt.tokenizer)
    paths = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--work-dir", str(tmp_path / "work")]
    words = [*paths, "--method", method, "--target", str(tmp_path / "target")]
    assert tool.main([*words, "--quick"]) == 0
    assert f"{method} step 6/6" in capsys.readouterr().out
    assert tool.main([*words, "--evaluate"]) == 0
    found = json.loads(capsys.readouterr().out)[method]
    assert set(found) == {"held out", "benchmark"}
    assert all(each["drafts"] and each["length"] >= 1 for kind in found.values() for each in kind.values())
