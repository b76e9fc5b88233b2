"""LLaVA's vision against transformers."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import pytest
from safetensors.numpy import save_file

from jaxinfer import load_model
from jaxinfer.images.registry import find_source
from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import Model
from jaxinfer.models.vision.clip import ClipConfig
from tests.models.vision.towers import (
    SCENES,
    golden_of,
    load,
    logit_faults,
    pixel_faults,
    row_error,
    served_faults,
    vision_of,
)

NAME = "llava"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(NAME, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("scene", SCENES)
def test_pixels_are_those_of_transformers(model: Model, scene: str) -> None:
    assert pixel_faults(model, golden_of(NAME).scenes[scene]) == []


@pytest.mark.parametrize("extra", [0, 16])
@pytest.mark.parametrize("scene", SCENES)
def test_rows_are_those_of_transformers_in_any_program(model: Model, scene: str, extra: int) -> None:
    assert row_error(model, golden_of(NAME).scenes[scene], extra) <= 1


def test_served_tokens_and_logprobs_are_those_of_transformers(model: Model) -> None:
    assert served_faults(model, golden_of(NAME).scenes["several"]) == []


@pytest.mark.parametrize("scene", ["text", *SCENES])
def test_logits_are_those_of_transformers(model: Model, scene: str) -> None:
    assert logit_faults(model, golden_of(NAME).scenes[scene]) == []


@pytest.mark.parametrize(
    ("prefix", "tower"),
    [("", "vision_tower.vision_model."), ("model.", "vision_tower.vision_model."), ("model.", "vision_tower.")],
)
def test_names_of_older_and_newer_checkpoints_are_read(
    model: Model, tmp_path: pathlib.Path, prefix: str, tower: str
) -> None:
    golden = golden_of(NAME)

    def spelled(name: str) -> str:
        name = name.replace("vision_tower.", tower)
        return name if name.startswith("language_model.") else prefix + name

    tensors = {spelled(name): tensor for name, tensor in golden.tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(golden.files["config.json"]))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(golden.files["preprocessor_config.json"]))
    other = load_model(str(tmp_path), dtype="float32", show_progress=False)
    same = jax.tree.map(lambda one, two: bool((one == two).all()), other.params, model.params)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    "change",
    [
        {"depth": 3},  # the last layer, which LLaVA skips
        {"activation": "gelu"},
        {"projector_activation": "silu"},
    ],
)
def test_an_overlooked_switch_is_noticed(model: Model, change: dict[str, Any]) -> None:
    vision = vision_of(model)
    config = dataclasses.replace(vision.config, **change)
    other = dataclasses.replace(vision, config=config, module=vision.module.clone(config=config))
    params = model.params["vision"]
    params = {**params, "layers_2": params["layers_0"]} if "depth" in change else params
    wrong = dataclasses.replace(model, vision=other, params={**model.params, "vision": params})
    assert row_error(wrong, golden_of(NAME).scenes["one"]) > 10


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vision_feature_layer", [1, 2]),
        ("vision_feature_layer", 5),
        ("vision_feature_select_strategy", "full"),
        ("vision_config.image_size", 18),
        ("vision_config.num_attention_heads", 5),
        ("vision_config.num_channels", 1),
        ("vision_config", 3),
    ],
)
def test_what_is_not_supported_is_named(field: str, value: Any) -> None:
    config = {**golden_of(NAME).files["config.json"]}
    outer, _, name = field.partition(".")
    config[outer] = {**config[outer], name: value} if name else value
    with pytest.raises(ConfigError, match=name or outer):
        ClipConfig.from_json(config)


def test_other_towers_are_left_out(tmp_path: pathlib.Path) -> None:
    """LLaVA with a tower other than CLIP's runs as a text model."""
    files = golden_of(NAME).files
    config = files["config.json"]
    other = {**config, "vision_config": {**config["vision_config"], "model_type": "siglip_vision_model"}}
    save_file(golden_of(NAME).tensors(), tmp_path / "model.safetensors")
    for name, content in {**files, "config.json": other}.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_model(str(tmp_path), dtype="float32", show_progress=False).vision is None
    assert find_source(tmp_path) is None


@pytest.mark.parametrize(("layer", "depth"), [(-1, 3), (-2, 2), (1, 1), (0, 0), (-4, 0)])
def test_the_layer_whose_output_is_projected(layer: int, depth: int) -> None:
    config = {**golden_of(NAME).files["config.json"], "vision_feature_layer": layer}
    assert ClipConfig.from_json(config).depth == depth
