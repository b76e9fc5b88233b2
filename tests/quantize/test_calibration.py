"""Statistics of weight inputs against numpy; accepted and rejected calibration texts."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.models.model import Model
from jaxinfer.quantize import Calibration, RecipeError, read_calibration
from jaxinfer.quantize.calibration import Batch, entered, observed, passed
from jaxinfer.quantize.layer import LayerWeights
from jaxinfer.types import walk_specs
from tests.quantize.models import folder_of, samples


def layer_of(model: Model, index: int) -> LayerWeights:
    specs = dict(walk_specs(model.specs[f"layers_{index}"]))
    values = {}
    for path in specs:
        node = model.params[f"layers_{index}"]
        for key in path:
            node = node[key]
        values[path] = np.array(node)
    return LayerWeights(index, model.module.block(index, None), specs, values)


def first_layer(name: str, folder: pathlib.Path) -> tuple[Model, LayerWeights, list[Batch]]:
    model = load_model(str(folder_of(name, folder)), "float32", show_progress=False)
    return model, layer_of(model, 0), entered(model.module, model.params, samples(), "float32")


def normed(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    x = x.reshape(-1, x.shape[-1]).astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def test_they_are_those_of_what_the_norm_gives(tmp_path: pathlib.Path):
    model, layer, batches = first_layer("qwen2-bias", tmp_path)
    paths = (("attention", "qkv"), ("attention", "out"), ("mlp", "down"))
    seen = observed(model.module, layer, paths, batches, gram=True)
    hidden = np.concatenate([batch.carried for batch in batches])
    x = normed(hidden, layer.values["attention_norm", "scale"], model.config.norm_eps)
    own = seen["attention", "qkv"]
    assert set(seen) == set(paths)
    assert float(own.rows) == len(x) == 240
    assert np.allclose(np.asarray(own.gram), x.T @ x, rtol=1e-4, atol=1e-3)
    assert np.allclose(np.asarray(own.largest), np.abs(x).max(0), rtol=1e-5)
    assert np.allclose(np.asarray(own.total), np.abs(x).sum(0), rtol=1e-5)
    without = observed(model.module, layer, paths, batches, gram=False)
    assert without["mlp", "down"].gram.shape == ()
    assert np.array_equal(np.asarray(without["mlp", "down"].largest), np.asarray(seen["mlp", "down"].largest))


def test_each_expert_has_those_of_its_own_tokens(tmp_path: pathlib.Path):
    model, layer, batches = first_layer("qwen2_moe-hub", tmp_path)
    paths = (("mlp", "gate_up"), ("mlp", "router"), ("mlp", "down"))
    seen = observed(model.module, layer, paths, batches, gram=True)
    experts, every = seen["mlp", "gate_up"], seen["mlp", "router"]
    top_k = model.config.rule.top_k
    assert float(experts.rows.sum()) == 240 * top_k
    assert np.array_equal(np.asarray(experts.rows), np.asarray(seen["mlp", "down"].rows))
    # a token's vector goes to each of its experts
    assert np.allclose(np.asarray(experts.gram.sum(0)), top_k * np.asarray(every.gram), rtol=1e-3, atol=1e-2)
    assert np.allclose(np.asarray(experts.total.sum(0)), top_k * np.asarray(every.total), rtol=1e-4)
    assert np.allclose(np.asarray(experts.largest.max(0)), np.asarray(every.largest), rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["gemma2-window", "gemma3n_text-hub", "gemma4_text-effective-hub", "glm_moe_dsa-every-other"]
)
def test_layers_one_after_the_other_are_the_model(name: str, tmp_path: pathlib.Path):
    """Also layers that read embeddings of their own, keys and values of other layers, or tokens that these chose."""
    model, _, batches = first_layer(name, tmp_path)
    tokens = jnp.asarray(samples().tokens)
    for index in range(len(model.config.layers)):
        passed(model.module, layer_of(model, index), batches)
    hidden = np.concatenate([model.module.hidden(jax.tree.map(jnp.asarray, batch.carried)) for batch in batches])
    states = model.module.apply({"params": model.params}, jnp.asarray(hidden), method="normed")
    assert np.allclose(np.asarray(states), np.asarray(jax.jit(model.hidden)(model.params, tokens)), atol=1e-4)


class Letters:
    """A tokenizer with a token for each byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_samples_are_spread_over_the_text(tmp_path: pathlib.Path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(65 + index) * 10 for index in range(26)))
    read = read_calibration(str(path), Letters(), samples=4, length=10)
    assert read.tokens[:, 0].tolist() == [65, 65 + 8, 65 + 17, 65 + 25]
    assert read.tokens.shape == (4, 10)
    assert read_calibration(str(path), Letters(), samples=100, length=100).tokens.shape == (2, 100)
    lines = tmp_path / "text.jsonl"
    lines.write_text("\n".join(json.dumps({"text": "x" * 7}) for _ in range(3)) + "\n")
    assert read_calibration(str(lines), Letters(), length=20).tokens.tolist() == [[120] * 20]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("short.txt", b"abc", "has 3 tokens, less than one sample of 10"),
        ("latin.txt", b"\xff\xfe" * 20, "is not UTF-8"),
        ("lines.jsonl", b"[1]\n", "not an object with a text"),
        ("numbers.jsonl", b'{"text": 3}\n', "a text that is not a string"),
        ("deep.jsonl", b"[" * 100_000, "not an object with a text"),
        ("absent.txt", None, "cannot be read"),
    ],
)
def test_a_bad_text_is_refused(tmp_path: pathlib.Path, name: str, content: bytes | None, sentence: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError, match=sentence):
        read_calibration(str(tmp_path / name), Letters(), length=10)


def test_a_digest_tells_samples_apart():
    assert samples().digest == samples().digest != samples(seed=1).digest
    assert Calibration(samples().tokens, batch=1).digest == samples().digest
