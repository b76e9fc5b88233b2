"""Published preprocessor_config.json files: read, or refused by the field that is not supported."""

import json
import pathlib
from typing import Any

import pytest

from jaxinfer.images.registry import ProcessorSource
from jaxinfer.models.vision.registry import VISION_FAMILIES

FILES = pathlib.Path(__file__).parents[1] / "census" / "preprocessors.jsonl"
ROWS = [json.loads(line) for line in FILES.read_text(encoding="utf-8").splitlines()]
CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
TOWERS: dict[str, dict[str, Any]] = {
    "Qwen3VLForConditionalGeneration": {"patch_size": 16},
    "LlavaForConditionalGeneration": CLIP,
    "Idefics3ForConditionalGeneration": {"image_size": 512, "patch_size": 16},
}
"""Towers of the models that the files are tried with, where a processor depends on it."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["source"])
def test_a_file_is_read_or_refused_by_field(row: dict[str, Any]) -> None:
    architecture = row["architecture"]
    config = {"architectures": [architecture], "vision_config": TOWERS.get(architecture, {}), "image_token_id": 10}
    source = ProcessorSource(VISION_FAMILIES[architecture].maker, config, {"preprocessor_config.json": row["config"]})
    if "tiles" in row:
        made: Any = source.processor()
        assert [made.tile, made.longest] == row["tiles"]
        return
    if "pixels" in row:
        assert list(source.processor().pixels) == row["pixels"]
        return
    with pytest.raises(ValueError, match=r"preprocessor_config\.json") as refused:
        source.processor()
    assert f" {row['refused']} = " in str(refused.value)
