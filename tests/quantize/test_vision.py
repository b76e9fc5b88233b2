"""Quantised models with a vision tower: the tower is the source's, to the byte, and the model takes images."""

import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.convert import Conversion, convert
from jaxinfer.images.processor import PROCESSOR_FILES
from jaxinfer.models.model import Model
from jaxinfer.quant import is_stored
from jaxinfer.quantize import Recipe
from jaxinfer.quantize.driver import quantize
from jaxinfer.types import VISION
from jaxinfer.weights.open import open_model_files
from tests.models.vision.towers import golden_of, images_of
from tests.quantize.models import samples
from tests.quantize.test_folder import assert_same
from tools.oracle.images_golden import write_image_checkpoint

RECIPES = {
    "compressed-tensors": Recipe("int8"),
    "awq": Recipe("awq", group_size=16),
    "gptq": Recipe("gptq", group_size=16),
    "bitsandbytes": Recipe("nf4"),
}
FAMILIES = ("qwen2_vl", "qwen3_vl_moe", "qwen3_5", "llava", "gemma3", "mistral3")
CASES = [*(("qwen2_5_vl", form) for form in RECIPES), *((name, "compressed-tensors") for name in FAMILIES)]


def source_of(name: str, root: pathlib.Path) -> pathlib.Path:
    return write_image_checkpoint(golden_of(name), root / "source")


def quantised(source: pathlib.Path, folder: pathlib.Path, recipe: Recipe, kind: str = "safetensors") -> pathlib.Path:
    quantize(str(source), folder, recipe, samples(), output_format=kind)
    return folder


def loaded(folder: pathlib.Path, **options: Any) -> Model:
    return load_model(str(folder), "float32", show_progress=False, **options)


def logits(model: Model, name: str) -> np.ndarray:
    """Return the logits of a prompt with images."""
    scene = golden_of(name).scenes["several"]
    return np.asarray(model.apply(model.params, jnp.asarray(scene.prompt), images_of(model, scene)))


def faults(folder: pathlib.Path, source: pathlib.Path) -> list[str]:
    """Return the tensors of the tower that are not those of the source, and changed files."""
    own, other = open_model_files(folder), open_model_files(source)
    named = set(own.outside) ^ set(other.outside)
    bytes_of = [{name: each.tensors.read(name).tobytes() for name in other.outside} for each in (own, other)]
    files = [name for name in PROCESSOR_FILES if (source / name).exists()]
    changed = [name for name in files if (folder / name).read_text() != (source / name).read_text()]
    kept = ("architectures", "vision_config", "text_config", "image_token_id", "image_token_index")
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, source)]
    changed += [name for name in kept if configs[0].get(name) != configs[1].get(name)]
    return [*named, *(name for name in other.outside if bytes_of[0][name] != bytes_of[1][name]), *changed]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_the_tower_is_kept(name: str, form: str, tmp_path: pathlib.Path):
    source = source_of(name, tmp_path)
    folder = quantised(source, tmp_path / "out", RECIPES[form])
    assert open_model_files(source).outside
    assert faults(folder, source) == []
    model, before = loaded(folder), loaded(source)
    assert sum(map(is_stored, jax.tree.leaves(model.params, is_leaf=is_stored)))
    assert not any(map(is_stored, jax.tree.leaves(model.params[VISION], is_leaf=is_stored)))
    error = np.abs(logits(model, name) - logits(before, name)).max()
    assert 0 < error < 0.5


@pytest.mark.parametrize(("name", "form"), [("qwen2_5_vl", "awq"), ("llava", "compressed-tensors")])
def test_quantising_to_orbax_is_converting_the_quantised_folder(name: str, form: str, tmp_path: pathlib.Path):
    source = source_of(name, tmp_path)
    folder, direct = (quantised(source, tmp_path / kind, RECIPES[form], kind) for kind in ("safetensors", "orbax"))
    assert_same(direct, converted(folder, tmp_path / "converted"))
    np.testing.assert_array_equal(logits(loaded(direct), name), logits(loaded(folder), name))


def converted(source: pathlib.Path, folder: pathlib.Path, kind: str = "orbax") -> pathlib.Path:
    convert(Conversion(str(source), folder, output_format=kind))
    return folder


@pytest.mark.parametrize("form", RECIPES)
def test_the_config_names_the_tower_as_not_quantised(form: str, tmp_path: pathlib.Path):
    folder = quantised(source_of("llava", tmp_path), tmp_path / "out", RECIPES[form])
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    match form:
        case "compressed-tensors":
            patterns = [each.removeprefix("re:") for each in config["ignore"] if each.startswith("re:")]
        case "gptq":
            patterns = [each.removeprefix("-:") for each in config["dynamic"]]
        case _:
            given = config["modules_to_not_convert" if form == "awq" else "llm_int8_skip_modules"]
            patterns = [f".*{name}.*" for name in given if name != "lm_head"]
    tensors = open_model_files(folder).tensors.tensors
    modules = {name.rpartition(".")[0] for name in tensors if "language_model" not in name}
    skipped = {name for name in modules if any(re.match(pattern, name) for pattern in patterns)}
    assert skipped == modules
    text = [name for name in tensors if "language_model" in name]
    assert not [name for name in text if any(re.match(pattern, name) for pattern in patterns)]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "gemma3"])
def test_a_converted_model_is_the_source_with_its_tower_and_back(name: str, tmp_path: pathlib.Path):
    source = source_of(name, tmp_path)
    want = logits(loaded(source), name)
    folder = converted(source, tmp_path / "orbax")
    back = converted(folder, tmp_path / "back", "safetensors")
    for each in (folder, back, converted(source, tmp_path / "plain", "safetensors")):
        np.testing.assert_array_equal(logits(loaded(each), name), want)
        assert loaded(each, vision=False).vision is None
    assert converted(back, tmp_path / "again").exists()
    assert_same(folder, tmp_path / "again")
    smaller, direct = (quantised(each, tmp_path / f"{each.name}-int8", Recipe("int8")) for each in (folder, source))
    assert any("language_model" in each for each in open_model_files(smaller).tensors.tensors)
    np.testing.assert_array_equal(logits(loaded(smaller), name), logits(loaded(direct), name))
