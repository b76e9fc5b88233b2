"""Whole models: quantised, written, loaded again; interrupted; rejected."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.quant.make import IntegerGrid, integers
from jaxinfer.quantize import Recipe, RecipeError
from jaxinfer.quantize.driver import quantize
from jaxinfer.weights import CheckpointError
from jaxinfer.weights.files import open_files
from jaxinfer.weights.formats import quantized_weights
from jaxinfer.weights.safetensors.checkpoint import open_checkpoint
from tests.quantize.models import folder_of, samples


def logits(folder: pathlib.Path) -> np.ndarray:
    model = load_model(str(folder), "float32", show_progress=False)
    return np.asarray(jax.jit(model.apply)(model.params, jnp.asarray(samples(2, 24, seed=9).tokens)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return folder_of("qwen2-bias", tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize(
    ("recipe", "most"),
    [
        (Recipe("int8"), 0.02),
        (Recipe("smoothquant"), 0.06),
        pytest.param(Recipe("gptq", bits=8, group_size=32, act_order=True), 0.02, marks=pytest.mark.slow),
        pytest.param(Recipe("awq", group_size=16), 0.5, marks=pytest.mark.slow),
        (Recipe("nf4"), 0.5),
    ],
)
def test_it_is_loaded_and_near_the_source(recipe: Recipe, most: float, source: pathlib.Path, tmp_path: pathlib.Path):
    quantize(str(source), tmp_path / "made", recipe, samples())
    expected, found = logits(source), logits(tmp_path / "made")
    error = np.sqrt(((found - expected) ** 2).mean()) / expected.std()
    assert 0 < error < most
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert {path.name for path in (tmp_path / "made").iterdir()} == {
        *(f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)),
        *("config.json", "model.safetensors.index.json", "tokenizer.json"),
    }
    assert not (tmp_path / "made.unfinished").exists()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen2_moe-hub", marks=pytest.mark.slow),
        "phi3-partial-hub",
        pytest.param("falcon-40b-hub", marks=pytest.mark.slow),
        "deepseek_v3-hub",
    ],
)
def test_families_whose_tensors_lie_otherwise(name: str, tmp_path: pathlib.Path):
    """Experts, tensors that fill several parameters, grouped queries, latents: each weight is rounded separately."""
    folder = folder_of(name, tmp_path / "source")
    quantize(str(folder), tmp_path / "made", Recipe("int8"))
    plain = open_checkpoint(folder)
    read, _ = quantized_weights(open_checkpoint(tmp_path / "made"), open_files(tmp_path / "made").config_json)
    assert len(read) >= 8
    for weight, stored in read.items():
        expected = integers(jnp.asarray(plain.read(weight)), IntegerGrid(8, 0)).dequantize()
        assert np.array_equal(stored.dense(), np.asarray(expected)), weight
    expected, found = logits(folder), logits(tmp_path / "made")
    # where a router is nearly undecided, a token goes to another expert
    assert np.sqrt(((found - expected) ** 2).mean()) < 0.1 * expected.std()
    config = open_files(tmp_path / "made").config_json["quantization_config"]
    dense = {module for module in config["ignore"] if module != "lm_head"}
    linear = {n.removesuffix(".weight") for n, info in plain.tensors.items() if len(info.shape) == 2 and "layers" in n}
    quantized = {n.removesuffix(".weight") for n in read}
    assert not dense & quantized
    assert {module for module in linear if "norm" not in module} <= dense | quantized


def test_gptq_is_nearer_than_rounding(source: pathlib.Path, tmp_path: pathlib.Path):
    expected, errors = logits(source), {}
    for method in ("int4", "gptq", "awq"):
        recipe = Recipe(method, group_size=32, symmetric=False, weight_format="compressed-tensors")
        quantize(str(source), tmp_path / method, recipe, samples(16, 64))
        errors[method] = float(((logits(tmp_path / method) - expected) ** 2).mean())
    assert errors["gptq"] < errors["int4"]
    assert errors["awq"] < errors["int4"]


@pytest.mark.parametrize(
    "recipe",
    [Recipe("gptq", group_size=32), pytest.param(Recipe("int8"), marks=pytest.mark.slow)],
    ids=["gptq", "int8"],
)
def test_an_interrupted_run_goes_on(recipe: Recipe, source: pathlib.Path, tmp_path: pathlib.Path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    quantize(str(source), whole, recipe, samples())
    done: list[int] = []

    def stop(count: int, total: int, name: str) -> None:
        done.append(count)
        if len(done) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(str(source), resumed, recipe, samples(), progress=stop)
    assert not resumed.exists()
    quantize(str(source), resumed, recipe, samples(), progress=stop)
    assert done == [1, 2]  # the first layer was not redone
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in resumed.iterdir())
    assert all((whole / name).read_bytes() == (resumed / name).read_bytes() for name in names)


def test_what_another_run_left_is_not_used(source: pathlib.Path, tmp_path: pathlib.Path):
    def stop(count: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(str(source), tmp_path / "made", Recipe("int8"), progress=stop)
    done: list[int] = []
    quantize(str(source), tmp_path / "made", Recipe("fp8"), progress=lambda count, total, name: done.append(count))
    assert done == [1, 2]
    assert open_files(tmp_path / "made").config_json["quantization_config"]["format"] == "float-quantized"


@pytest.mark.slow
def test_experts_without_tokens_are_rounded(tmp_path: pathlib.Path):
    folder = folder_of("qwen2_moe-hub", tmp_path / "source")
    recipe = Recipe("gptq", group_size=20, short_groups=True, weight_format="compressed-tensors")
    summary = quantize(str(folder), tmp_path / "made", recipe, samples(1, 10))
    assert any("experts" in kind.name and kind.starved for kind in summary.quantized)
    assert "rounded to nearest for want of samples" in "\n".join(summary.lines())
    assert np.isfinite(logits(tmp_path / "made")).all()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_layers(tmp_path: pathlib.Path):
    folder = folder_of("qwen2-layer-types", tmp_path / "source")
    held: list[int] = []

    def measure(count: int, total: int, name: str) -> None:
        held.append(sum(array.nbytes for array in jax.live_arrays()))

    quantize(str(folder), tmp_path / "made", Recipe("gptq", group_size=16), samples(), progress=measure)
    assert len(held) == 3
    assert held[2] <= held[1]


def test_what_cannot_be_done_is_refused(source: pathlib.Path, tmp_path: pathlib.Path):
    with pytest.raises(RecipeError, match="gptq needs samples of text"):
        quantize(str(source), tmp_path / "made", Recipe("gptq"))
    quantize(str(source), tmp_path / "made", Recipe("int8"))
    with pytest.raises(CheckpointError, match="exists already"):
        quantize(str(source), tmp_path / "made", Recipe("int8"))
    with pytest.raises(CheckpointError, match="is quantised already"):
        quantize(str(tmp_path / "made"), tmp_path / "again", Recipe("int8"))
    olmo = folder_of("olmo2-hub", tmp_path / "olmo")
    with pytest.raises(RecipeError, match="no norm is before"):
        quantize(str(olmo), tmp_path / "again", Recipe("smoothquant"), samples())
    assert not (tmp_path / "again.unfinished").exists()
    (tmp_path / "mine.unfinished").mkdir()
    (tmp_path / "mine.unfinished" / "notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="is in the way"):
        quantize(str(source), tmp_path / "mine", Recipe("int8"))
