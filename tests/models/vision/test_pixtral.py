"""Mistral 3's vision against transformers."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import Model
from jaxinfer.models.vision.pixtral import PixtralConfig
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

NAMES = ("mistral3", "mistral3-ministral3")


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model]:
    return request.param, load(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("scene", SCENES)
def test_pixels_are_those_of_transformers(loaded: tuple[str, Model], scene: str) -> None:
    name, model = loaded
    assert pixel_faults(model, golden_of(name).scenes[scene]) == []


@pytest.mark.parametrize("extra", [0, 28])
@pytest.mark.parametrize("scene", SCENES)
def test_rows_are_those_of_transformers_in_any_program(loaded: tuple[str, Model], scene: str, extra: int) -> None:
    name, model = loaded
    assert row_error(model, golden_of(name).scenes[scene], extra) <= 1


def test_served_tokens_and_logprobs_are_those_of_transformers(loaded: tuple[str, Model]) -> None:
    name, model = loaded
    assert served_faults(model, golden_of(name).scenes["several"], break_token=63, end_token=61) == []


@pytest.mark.parametrize("scene", ["text", *SCENES])
def test_logits_are_those_of_transformers(loaded: tuple[str, Model], scene: str) -> None:
    name, model = loaded
    assert logit_faults(model, golden_of(name).scenes[scene]) == []


def test_the_tokens_after_rows_are_those_of_the_vocabulary(tmp_path: pathlib.Path) -> None:
    vocabulary = {f"w{index}": index for index in range(62)} | {"[IMG_BREAK]": 62, "[IMG_END]": 63}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    assert vision_of(load(NAMES[0], tmp_path)).processor.expand((1, 4, 2)) == [62, 62, 62, 63]


@pytest.mark.parametrize("change", [{"theta": 60.0}, {"projector_eps": 1e-2}, {"activation": "gelu"}])
def test_an_overlooked_switch_is_noticed(loaded: tuple[str, Model], change: dict[str, Any]) -> None:
    name, model = loaded
    vision = vision_of(model)
    config = dataclasses.replace(vision.config, **change)
    other = dataclasses.replace(vision, config=config, module=vision.module.clone(config=config))
    assert row_error(dataclasses.replace(model, vision=other), golden_of(name).scenes["one"]) > 10


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("vision_feature_layer", [1, 2], "vision_feature_layer"),
        ("spatial_merge_size", 0, "spatial_merge_size"),
        ("vision_config.model_type", "clip_vision_model", "model_type"),
        ("vision_config.rope_parameters", 3, "rope_parameters"),
        ("vision_config.rope_parameters", {"rope_type": "yarn"}, "rope_type"),
        ("vision_config.hidden_size", 24, "hidden_size"),
    ],
)
def test_what_is_not_supported_is_named(field: str, value: Any, named: str) -> None:
    config = {**golden_of(NAMES[0]).files["config.json"]}
    outer, _, name = field.partition(".")
    config[outer] = {**config[outer], name: value} if name else value
    with pytest.raises(ConfigError, match=named):
        PixtralConfig.from_json(config)
