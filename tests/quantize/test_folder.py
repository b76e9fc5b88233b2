"""Quantising directly to Orbax equals converting quantised safetensors; interrupted runs, and all families."""

import json
import pathlib

import numpy as np
import pytest

from jaxinfer import convert
from jaxinfer.quantize import Recipe, RecipeError
from jaxinfer.quantize.driver import quantize
from jaxinfer.weights import CheckpointError
from jaxinfer.weights.native.manifest import MANIFEST, UNFINISHED
from jaxinfer.weights.open import open_model_files
from tests.quantize.models import folder_of, samples
from tests.quantize.test_driver import logits

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return folder_of("qwen2-bias", tmp_path_factory.mktemp("source"))


def made(source: pathlib.Path, folder: pathlib.Path, recipe: Recipe, kind: str = "orbax", **settings) -> pathlib.Path:
    quantize(str(source), folder, recipe, samples(), output_format=kind, **settings)
    return folder


def converted(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    convert.convert(convert.Conversion(str(source), folder))
    return folder


def contents(folder: pathlib.Path) -> dict[str, object]:
    """Return the contents of every file that a reader opens; Orbax's own metadata contains the time."""
    values = {path for path in folder.glob("params/*/*/c/**/*") if path.is_file()}
    read: dict[str, object] = {str(path.relative_to(folder)): path.read_bytes() for path in values}
    return {**read, **{path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}}


def assert_same(one: pathlib.Path, other: pathlib.Path) -> None:
    mine, theirs = contents(one), contents(other)
    assert mine.keys() == theirs.keys()
    assert MANIFEST in mine
    assert [name for name in mine if mine[name] != theirs[name]] == []


RECIPES = {
    "int8": Recipe("int8"),
    "fp8": Recipe("fp8", activations=True),
    "smoothquant": Recipe("smoothquant"),
    "int4": Recipe("int4", group_size=32, symmetric=False),
    "gptq-act-order": Recipe("gptq", group_size=32, act_order=True),
    "gptq-static": Recipe(
        "gptq", group_size=32, act_order=True, static_groups=True, weight_format="compressed-tensors"
    ),
    "awq": Recipe("awq", group_size=16),
    "nf4": Recipe("nf4"),
    "fp4": Recipe("fp4", nested=False),
    "mxfp4": Recipe("mxfp4"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "nf4" else slow) for name in RECIPES])
def test_it_is_what_converting_the_safetensors_gives(name: str, source: pathlib.Path, tmp_path: pathlib.Path):
    straight = made(source, tmp_path / "straight", RECIPES[name])
    files = made(source, tmp_path / "files", RECIPES[name], "safetensors")
    assert_same(straight, converted(files, tmp_path / "converted"))
    assert {path.name for path in straight.iterdir()} == {"config.json", "params", "tokenizer.json", MANIFEST}


@slow
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("qwen2_moe-hub", Recipe("nf4")),
        ("phi3-partial-hub", Recipe("int8")),
        ("falcon-40b-hub", Recipe("fp8")),
        ("deepseek_v3-hub", Recipe("int8")),
        ("gemma2-window", Recipe("gptq", group_size=16)),
        ("gpt_oss-hub", Recipe("int8")),
        ("qwen2_moe-hub", Recipe("gptq", group_size=32)),  # some of a layer's weights stay unquantised
    ],
)
def test_families_whose_tensors_lie_otherwise(name: str, recipe: Recipe, tmp_path: pathlib.Path):
    folder = folder_of(name, tmp_path / "source")
    straight = made(folder, tmp_path / "straight", recipe)
    files = made(folder, tmp_path / "files", recipe, "safetensors")
    assert_same(straight, converted(files, tmp_path / "converted"))
    assert np.array_equal(logits(straight), logits(files))


@slow
def test_a_folder_with_act_order_gives_the_same_logits(source: pathlib.Path, tmp_path: pathlib.Path):
    recipe = RECIPES["gptq-act-order"]
    straight = made(source, tmp_path / "straight", recipe)
    files = made(source, tmp_path / "files", recipe, "safetensors")
    assert np.array_equal(logits(straight), logits(files))


def test_an_interrupted_run_goes_on(source: pathlib.Path, tmp_path: pathlib.Path):
    recipe, done = RECIPES["gptq-static"], []

    def stop(count: int, total: int, name: str) -> None:
        done.append(count)
        if len(done) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(source, tmp_path / "resumed", recipe, progress=stop)
    unfinished = tmp_path / "resumed.unfinished"
    assert (unfinished / UNFINISHED).exists()
    with pytest.raises(CheckpointError, match="is an unfinished conversion"):
        open_model_files(unfinished)
    (unfinished / "params" / "layers_1.orbax-checkpoint-tmp-1").mkdir()  # leftover of a killed run
    first = {path: path.stat().st_mtime_ns for path in (unfinished / "params" / "layers_0").rglob("*")}
    made(source, tmp_path / "resumed", recipe, progress=stop)
    assert done == [1, 2]  # the first layer was not redone
    assert all(
        (tmp_path / "resumed" / path.relative_to(unfinished)).stat().st_mtime_ns == time for path, time in first.items()
    )
    assert_same(tmp_path / "resumed", made(source, tmp_path / "whole", recipe))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed", "whole"]


def test_another_format_begins_anew(source: pathlib.Path, tmp_path: pathlib.Path):
    def stop(count: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(source, tmp_path / "made", Recipe("int8"), progress=stop)
    files = made(source, tmp_path / "made", Recipe("int8"), "safetensors")
    assert not list(files.glob("params*"))
    assert not list(files.glob("jaxinfer*"))


def test_a_recipe_that_takes_no_weight_is_refused(source: pathlib.Path, tmp_path: pathlib.Path):
    with pytest.raises(
        RecipeError, match=r"cannot take any weight of this model \(.*q_proj.weight: groups of 60 do not"
    ):
        made(source, tmp_path / "made", Recipe("int4", group_size=60))
    assert not list(tmp_path.iterdir())
