"""The figures of benchmarks/quality.py: perplexity by hand, bits by hand, and disjoint text splits."""

import json
import math
import pathlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import quality
from jaxinfer.quantize import Recipe
from jaxinfer.quantize.driver import quantize
from jaxinfer.weights.formats import quantized_weights
from jaxinfer.weights.safetensors.checkpoint import open_checkpoint, read_json_object
from tests.quantize.models import folder_of, samples


class Letters:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_losses_and_divergence_are_those_of_the_probabilities():
    def apply(params, tokens):
        return jnp.broadcast_to(params, (*tokens.shape, 4))

    def model(probabilities):
        return types.SimpleNamespace(apply=apply, params=jnp.log(jnp.asarray(probabilities)))

    probabilities, others = np.array([0.5, 0.25, 0.125, 0.125]), np.array([0.25, 0.25, 0.25, 0.25])
    windows = np.array([[3, 0, 0, 1], [2, 1, 2, 0]] * 9, np.int32)
    exact = quality.Exact(model(probabilities), windows)
    assert exact.losses == pytest.approx(-np.log(probabilities[windows[:, 1:]]).mean(axis=1), rel=1e-5)
    losses, divergence = exact.compared(model(others))
    assert losses == pytest.approx(np.full(18, math.log(4)), rel=1e-5)
    assert divergence == pytest.approx(float((probabilities * np.log(probabilities / others)).sum()), rel=1e-5)


def test_differences_are_paired_by_window():
    def row(*losses: float) -> quality.Row:
        return quality.Row("m", "k", 8.0, 1.0, 1.0, None, losses)

    apart = math.log(1.01)
    assert quality.difference(row(5.0 + apart, 1.0 + apart), row(5.0, 1.0)) == "+1.00 % ± 0.00"
    assert quality.difference(row(5.02, 1.0), row(5.0, 1.0)) == "+1.01 % ± 1.00"


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
    quantize(str(source), tmp_path / "made", Recipe("int4", group_size=32), samples())
    config = read_json_object(tmp_path / "made" / "config.json")
    weights, _ = quantized_weights(open_checkpoint(tmp_path / "made"), config)
    assert quality.bits_of(weights, tmp_path / "made") == pytest.approx(4 + 32 / 32)  # scales are float32


@pytest.mark.slow
def test_every_kind_has_a_recipe_and_figures_are_kept(tmp_path: pathlib.Path, test_data: pathlib.Path):
    kinds = quality.recipes()
    assert len(kinds) == 27
    sizes = {name: (recipe.group_size, recipe.symmetric) for name, recipe in kinds.items() if name.startswith("int4")}
    assert {sizes[name] for name in sizes} == {(group, zeros) for group in (128, 64, 32) for zeros in (True, False)}
    path = tmp_path / "quality.json"
    command = ["--models", "demo", "--windows", "1", "--data", str(test_data), "--json", str(path), "--only"]
    assert quality.main([*command, "nothing"]) == 0
    begun = json.loads(path.read_text())
    assert [row["kind"] for row in begun["rows"]] == ["float32"]
    begun["rows"][0]["perplexity"] = 1.0
    path.write_text(json.dumps(begun))
    assert quality.main([*command, "bfloat16"]) == 0  # resumes
    rows = json.loads(path.read_text())["rows"]
    assert [(row["kind"], row["perplexity"] == 1.0) for row in rows] == [("float32", True), ("bfloat16", False)]
    assert quality.main([*command, "nothing", "--samples", "1"]) == 0  # other settings: from the beginning
    assert json.loads(path.read_text())["rows"][0]["perplexity"] > 1.0
