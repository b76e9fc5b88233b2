"""The figures of benchmarks/quality.py: perplexity by hand, bits by hand, and text that is not in both parts."""

import json
import math
import pathlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import quality
from jaxinfer.quantise import Recipe, quantise
from jaxinfer.weights.checkpoint import open_checkpoint, read_json_object
from jaxinfer.weights.formats import quantised_weights
from tests.quantise.models import folder_of, samples


class Letters:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_perplexity_is_that_of_the_probabilities():
    def apply(params, tokens):
        return jnp.broadcast_to(params, (*tokens.shape, 4))

    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    model = types.SimpleNamespace(apply=apply, params=jnp.log(jnp.asarray(probabilities)))
    windows = np.array([[3, 0, 0, 1], [2, 1, 2, 0]] * 9, np.int32)
    expected = math.exp(-np.log(probabilities[windows[:, 1:]]).mean())
    assert quality.perplexity(model, windows) == pytest.approx(expected, rel=1e-5)
    others = np.array([0.25, 0.25, 0.25, 0.25])
    other = types.SimpleNamespace(apply=apply, params=jnp.log(jnp.asarray(others)))
    divergence = float((probabilities * np.log(probabilities / others)).sum())
    assert quality.compared(other, model, windows) == pytest.approx((4.0, divergence), rel=1e-5)


def test_nobody_is_calibrated_on_the_held_out_text():
    text = "".join(chr(0x41 + index % 26) for index in range(200)) + "z" * 100
    subject = quality.Subject("mine", "", text, 1 / 3, 10)
    options = types.SimpleNamespace(samples=5, windows=7)
    calibration, windows = quality.split(subject, types.SimpleNamespace(tokenizer=Letters()), options)
    assert calibration.tokens.shape == (5, 10)
    assert not (calibration.tokens == ord("z")).any()
    assert (windows == ord("z")).all()
    assert windows.shape == (7, 10)


def test_bits_are_those_of_the_file(tmp_path: pathlib.Path):
    source = folder_of("qwen2-bias", tmp_path / "source")
    quantise(str(source), tmp_path / "made", Recipe("int4", group_size=32), samples())
    config = read_json_object(tmp_path / "made" / "config.json")
    weights, _ = quantised_weights(open_checkpoint(tmp_path / "made"), config)
    assert quality.bits_of(weights, tmp_path / "made") == pytest.approx(4 + 32 / 32)  # scales are float32


def test_every_kind_has_a_recipe_and_figures_are_kept(tmp_path: pathlib.Path, test_data: pathlib.Path):
    kinds = quality.recipes()
    assert len(kinds) == 27
    sizes = {name: (recipe.group_size, recipe.symmetric) for name, recipe in kinds.items() if name.startswith("int4")}
    assert {sizes[name] for name in sizes} == {(group, zeros) for group in (128, 64, 32) for zeros in (True, False)}
    path = tmp_path / "quality.json"
    assert (
        quality.main(
            ["--models", "demo", "--only", "nothing", "--windows", "1", "--data", str(test_data), "--json", str(path)]
        )
        == 0
    )
    assert [row["kind"] for row in json.loads(path.read_text())["rows"]] == ["float32"]
