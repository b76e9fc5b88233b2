"""Vision of Idefics3 and SmolVLM against transformers."""

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import Model
from jaxinfer.models.vision.idefics3 import Idefics3Config
from jaxinfer.types import VISION
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

NAMES = ("idefics3", "smolvlm")
TILES = ((55, 58), (59, 63))
TOKENS = (
    ("<fake_token_around_image>", 60),
    ("<global-img>", 61),
    ("\n", 56),
    ("\n\n", 57),
    *((f"<row_{row + 1}_col_{column + 1}>", TILES[row][column]) for row in range(2) for column in range(2)),
)


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model]:
    return request.param, load(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("scene", SCENES)
def test_pixels_are_those_of_transformers(loaded: tuple[str, Model], scene: str) -> None:
    name, model = loaded
    assert pixel_faults(model, golden_of(name).scenes[scene]) == []


@pytest.mark.parametrize("extra", [0, 16])
@pytest.mark.parametrize("scene", SCENES)
def test_rows_are_those_of_transformers_in_any_program(loaded: tuple[str, Model], scene: str, extra: int) -> None:
    name, model = loaded
    assert row_error(model, golden_of(name).scenes[scene], extra) <= 1


def test_served_tokens_and_logprobs_are_those_of_transformers(loaded: tuple[str, Model]) -> None:
    name, model = loaded
    assert served_faults(model, golden_of(name).scenes["several"], tokens=TOKENS) == []


@pytest.mark.parametrize("scene", ["text", *SCENES])
def test_logits_are_those_of_transformers(loaded: tuple[str, Model], scene: str) -> None:
    name, model = loaded
    assert logit_faults(model, golden_of(name).scenes[scene]) == []


def test_squares_of_patches_in_another_order_are_noticed(loaded: tuple[str, Model]) -> None:
    """A token's patches are read row by row."""
    name, model = loaded
    vision = model.params[VISION]
    parts = np.asarray(vision["project"]).reshape(32, *[golden_of(name).files["config.json"]["scale_factor"]] * 2, 32)
    params = {**vision, "project": jnp.asarray(parts.swapaxes(1, 2).reshape(32, -1))}
    other = model.replace(params={**model.params, VISION: params})
    assert row_error(other, golden_of(name).scenes["one"]) > 10


@pytest.mark.parametrize("change", [{"activation": "gelu"}, {"norm_eps": 1e-2}])
def test_an_overlooked_switch_is_noticed(loaded: tuple[str, Model], change: dict[str, Any]) -> None:
    name, model = loaded
    vision = vision_of(model)
    config = dataclasses.replace(vision.config, **change)
    other = dataclasses.replace(vision, config=config, module=vision.module.clone(config=config))
    assert row_error(dataclasses.replace(model, vision=other), golden_of(name).scenes["one"]) > 10


def test_a_saved_model_has_the_names_of_transformers(loaded: tuple[str, Model], tmp_path: pathlib.Path) -> None:
    name, model = loaded
    model.save(tmp_path)
    saved = {tensor for path in tmp_path.glob("*.safetensors") for tensor in load_file(path)}
    assert saved == set(golden_of(name).shapes)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("scale_factor", 3, "scale_factor"),
        ("scale_factor", 0, "scale_factor"),
        ("vision_config.model_type", "clip_vision_model", "model_type"),
        ("vision_config.image_size", [18, 18], "image_size"),
        ("vision_config.image_size", 100, "image_size"),
        ("vision_config.patch_size", 19, "image_size"),
        ("vision_config.hidden_act", "tanh", "hidden_act"),
    ],
)
def test_what_is_not_supported_is_named(field: str, value: Any, named: str) -> None:
    config = {**golden_of(NAMES[0]).files["config.json"]}
    outer, _, name = field.partition(".")
    config[outer] = {**config[outer], name: value} if name else value
    with pytest.raises(ConfigError, match=named):
        Idefics3Config.from_json(config)
