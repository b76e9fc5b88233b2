"""LLaVA's image processor against transformers."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxinfer.images.clip import make
from jaxinfer.images.processor import ImageError
from tests.images.towers import cases_of, faults, id_of, noise, prompt_faults

SQUARE: dict[str, Any] = {"size": {"shortest_edge": 48}, "crop_size": {"height": 48, "width": 48}}


def processor(settings: dict[str, Any], side: int, patch: int = 8, token: int = 14) -> Any:
    config = {"vision_config": {"image_size": side, "patch_size": patch}, "image_token_index": token}
    return make(config, {"preprocessor_config.json": settings})


@pytest.mark.parametrize("case", cases_of("clip"), ids=lambda case: str(case["settings"]["crop_size"]))
def test_pixels_are_those_of_transformers(case: dict[str, Any]) -> None:
    process = processor(case["settings"], case["settings"]["crop_size"], case["patch"])
    assert faults(process, case) == []


def test_prompts_are_those_of_transformers() -> None:
    vocabulary = id_of()
    process = processor({"size": {"shortest_edge": 8}, "crop_size": 8}, 8, 4, vocabulary("<image>") or 0)
    assert prompt_faults("clip", process) == []


def test_settings_are_read_as_transformers_saves_them() -> None:
    config = {"vision_config": {"image_size": 48, "patch_size": 8}, "image_token_id": 3}
    saved = {"processor_config.json": {"image_processor": SQUARE, "patch_size": 8}}
    assert make(config, saved) == processor(SQUARE, 48, token=3)


def test_a_digest_is_that_of_pixels_and_settings() -> None:
    process, picture = processor(SQUARE, 48), noise(50, 70)
    one = process.prepare(picture)
    assert one == process.prepare(picture)
    changed = picture.copy()
    changed[25, 35] ^= 255
    others = [process.prepare(changed), processor({**SQUARE, "image_std": 0.4}, 48).prepare(picture)]
    assert len({image.digest for image in (one, *others)}) == 3
    assert dataclasses.replace(process, image_token=5).prepare(picture) == one


def test_a_picture_that_would_be_too_large_is_refused() -> None:
    with pytest.raises(ImageError, match="1 x 65000"):
        processor({"size": {"shortest_edge": 336}, "crop_size": 336}, 336, 14).prepare(
            np.zeros((65000, 1, 3), np.uint8)
        )


def test_bounds_on_pixels_change_nothing() -> None:
    process, picture = processor(SQUARE, 48), noise(9, 9)
    assert process.prepare(picture, min_pixels=5, max_pixels=100) == process.prepare(picture)


@pytest.mark.parametrize("options", [{"max_pixels": -1}, {"min_pixels": 2.0}, {"crop_size": 8}])
def test_other_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ImageError, match=next(iter(options))):
        processor(SQUARE, 48).prepare(noise(9, 9), **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", {"longest_edge": 48}),
        ("size", {"shortest_edge": 0}),
        ("size", "48"),
        ("crop_size", {"height": 40, "width": 48}),
        ("crop_size", 40),
        ("do_resize", False),
        ("do_center_crop", False),
        ("do_pad", True),
        ("resample", 77),
        ("image_mean", [0.5, 0.5]),
        ("image_std", 0),
        ("rescale_factor", "x"),
        ("image_processor_type", "ViTImageProcessor"),
    ],
)
def test_settings_that_are_not_supported_are_named(name: str, value: Any) -> None:
    named = "size" if name == "do_center_crop" else name
    with pytest.raises(ValueError, match=f"preprocessor_config.json: {named} = "):
        processor({**SQUARE, name: value}, 48)


@pytest.mark.parametrize("side", ["48", -1, True])
def test_sizes_of_the_tower_are_checked(side: Any) -> None:
    with pytest.raises(ValueError, match="image_size = "):
        processor(SQUARE, side)
