"""Vision families by the architecture that config.json names: one row each, imported when it is looked up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.images.registry import reader_of
from jaxinfer.models.lazy import Lazy
from jaxinfer.models.vision.tower import VisionFamily

VISION_FAMILIES: Mapping[str, VisionFamily] = Lazy(
    "jaxinfer.models.vision",
    {
        "Qwen2VLForConditionalGeneration": "qwen2:QWEN2_VL",
        "Qwen2_5_VLForConditionalGeneration": "qwen2:QWEN2_5_VL",
        "Qwen3VLForConditionalGeneration": "qwen3:QWEN3_VL",
        "Qwen3VLMoeForConditionalGeneration": "qwen3:QWEN3_VL",
        "Qwen3_5ForConditionalGeneration": "qwen3:QWEN3_5",
        "Qwen3_5MoeForConditionalGeneration": "qwen3:QWEN3_5",
        "LlavaForConditionalGeneration": "clip:LLAVA",
        "Gemma3ForConditionalGeneration": "siglip:GEMMA3",
        "Mistral3ForConditionalGeneration": "pixtral:MISTRAL3",
        "Idefics3ForConditionalGeneration": "idefics3:IDEFICS3",
        "SmolVLMForConditionalGeneration": "idefics3:IDEFICS3",
    },
)


def vision_family_for(config_json: Mapping[str, Any]) -> VisionFamily | None:
    """Find the vision family of a checkpoint; None: it has no tower, or one that is not supported."""
    name = reader_of(config_json, VISION_FAMILIES)
    return None if name is None else VISION_FAMILIES[name]
