"""Tests of how the processor of a folder is found."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from jaxinfer.images.registry import source_of
from jaxinfer.models.config import ConfigError
from jaxinfer.models.vision.registry import VISION_FAMILIES
from tests.fake_vision_processor import FAKE, FakeProcessor


def folder(path: pathlib.Path, **files: object) -> pathlib.Path:
    for name, value in files.items():
        (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_processor_is_made_of_the_folders_files(tmp_path: pathlib.Path) -> None:
    files = {"preprocessor_config": {"max_pixels": 16}, "tokenizer_config": "no JSON"}
    source = source_of(folder(tmp_path, config={"image_token_id": 7}, **files), FAKE)
    assert source.files == {"preprocessor_config.json": {"max_pixels": 16}}
    assert source.processor() == FakeProcessor(7, max_pixels=16)


@pytest.mark.parametrize("text", ["{", "[]", " " * (1 << 21)])
def test_files_that_cannot_be_read(tmp_path: pathlib.Path, text: str) -> None:
    own = folder(tmp_path, config={"architectures": ["A"]}, preprocessor_config=text)
    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        source_of(own, FAKE)


@pytest.mark.parametrize("architecture", VISION_FAMILIES)
def test_the_processor_is_that_of_the_loaded_model(architecture: str, tmp_path: pathlib.Path) -> None:
    """A server's helpers make it of the same files, without the model."""
    vision = {
        "LlavaForConditionalGeneration": {"image_size": 336, "patch_size": 14},
        "Gemma3ForConditionalGeneration": {"image_size": 896, "patch_size": 14},
        "Idefics3ForConditionalGeneration": {"image_size": 364, "patch_size": 14},
        "SmolVLMForConditionalGeneration": {"image_size": 364, "patch_size": 14},
    }
    size = {"LlavaForConditionalGeneration": 336, "Gemma3ForConditionalGeneration": 896}.get(architecture)
    sizes = {} if size is None else {"size": {"height": size, "width": size}, "crop_size": size}
    config = {"architectures": [architecture], "vision_config": vision.get(architecture, {})}
    settings, family = {"image_mean": [0.1, 0.2, 0.3], **sizes}, VISION_FAMILIES[architecture]
    source = source_of(folder(tmp_path, config=config, preprocessor_config=settings), family.maker)
    assert source.processor() == family.processor(config, {"preprocessor_config.json": settings})


def test_a_processor_that_no_other_process_can_import_is_refused() -> None:
    family = next(iter(VISION_FAMILIES.values()))
    with pytest.raises(ConfigError, match="processor"):
        _ = dataclasses.replace(family, processor=lambda config, files: FakeProcessor()).maker
