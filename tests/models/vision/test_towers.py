"""LLaVA's, Gemma 3's, Mistral 3's and Idefics3's vision against transformers."""

from typing import Any

import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import Model
from jaxinfer.models.vision.registry import vision_family_for
from tests.models.vision.towers import (
    NAMES,
    SCENES,
    edited,
    golden_of,
    load,
    logit_faults,
    pixel_faults,
    row_error,
    served_faults,
    with_tower,
)

MISTRAL: dict[str, Any] = {"break_token": 63, "end_token": 61}
TILES = ((55, 58), (59, 63))
IDEFICS: dict[str, Any] = {
    "tokens": (
        ("<fake_token_around_image>", 60),
        ("<global-img>", 61),
        ("\n", 56),
        ("\n\n", 57),
        *((f"<row_{row + 1}_col_{column + 1}>", TILES[row][column]) for row in range(2) for column in range(2)),
    )
}
TOKENS: dict[str, dict[str, Any]] = {
    "llava": {},
    "gemma3": {"newlines": (56, 57)},
    "mistral3": MISTRAL,
    "mistral3-ministral3": MISTRAL,
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
}
"""Fields of the processor that the vocabulary of the golden files sets."""
EXTRA = {"llava": 16, "gemma3": 16, "mistral3": 28, "mistral3-ministral3": 28, "idefics3": 16, "smolvlm": 16}
"""Rows of padding in a program."""


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model]:
    return request.param, load(golden_of(request.param), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("scene", SCENES)
def test_pixels_are_those_of_transformers(loaded: tuple[str, Model], scene: str) -> None:
    name, model = loaded
    assert pixel_faults(model, golden_of(name).scenes[scene]) == []


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scene", SCENES)
def test_rows_are_those_of_transformers_in_any_program(loaded: tuple[str, Model], scene: str, padded: bool) -> None:
    name, model = loaded
    assert row_error(model, golden_of(name).scenes[scene], EXTRA[name] * padded) <= 1


def test_served_tokens_and_logprobs_are_those_of_transformers(loaded: tuple[str, Model]) -> None:
    name, model = loaded
    assert served_faults(model, golden_of(name).scenes["several"], **TOKENS[name]) == []


@pytest.mark.parametrize("scene", ["text", *SCENES])
def test_logits_are_those_of_transformers(loaded: tuple[str, Model], scene: str) -> None:
    name, model = loaded
    assert logit_faults(model, golden_of(name).scenes[scene]) == []


OVERLOOKED: dict[str, tuple[dict[str, Any], ...]] = {
    "llava": ({"activation": "gelu"}, {"projector_activation": "silu"}),
    "gemma3": ({"activation": "gelu"},),
    "mistral3": ({"theta": 60.0}, {"projector_eps": 1e-2}, {"activation": "gelu"}),
    "mistral3-ministral3": ({"theta": 60.0},),
    "idefics3": ({"activation": "gelu"}, {"norm_eps": 1e-2}),
    "smolvlm": ({"activation": "gelu"}, {"norm_eps": 1e-2}),
}


def test_an_overlooked_switch_is_noticed(loaded: tuple[str, Model]) -> None:
    name, model = loaded
    for change in OVERLOOKED[name]:
        assert row_error(with_tower(model, **change), golden_of(name).scenes["one"]) > 10, change


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llava", "vision_feature_layer", [1, 2]),
        ("llava", "vision_feature_layer", 5),
        ("llava", "vision_feature_select_strategy", "full"),
        ("llava", "vision_config.image_size", 18),
        ("llava", "vision_config.num_attention_heads", 5),
        ("llava", "vision_config.num_channels", 1),
        ("llava", "projector_hidden_act", "tanh"),
        ("gemma3", "mm_tokens_per_image", 8),
        ("gemma3", "mm_tokens_per_image", 25),
        ("gemma3", "vision_config.model_type", "clip_vision_model"),
        ("gemma3", "vision_config.hidden_act", "tanh"),
        ("idefics3", "scale_factor", 3),
        ("idefics3", "scale_factor", 0),
        ("idefics3", "vision_config.model_type", "clip_vision_model"),
        ("idefics3", "vision_config.image_size", [18, 18]),
        ("idefics3", "vision_config.image_size", 100),
        ("idefics3", "vision_config.hidden_act", "tanh"),
        ("mistral3", "vision_config", 3),
        ("mistral3", "vision_feature_layer", [1, 2]),
        ("mistral3", "spatial_merge_size", 0),
        ("mistral3", "vision_config.model_type", "clip_vision_model"),
        ("mistral3", "vision_config.rope_parameters", 3),
        ("mistral3", "vision_config.rope_parameters", {"rope_type": "yarn"}),
        ("mistral3", "vision_config.hidden_size", 24),
    ],
)
def test_what_is_not_supported_is_named(name: str, field: str, value: Any) -> None:
    config = edited(name, field, value)
    family = vision_family_for(golden_of(name).files["config.json"])
    assert family is not None
    with pytest.raises(ConfigError, match="rope_type" if isinstance(value, dict) else field.rpartition(".")[2]):
        family.config(config)
