"""Image processors of model folders, without the model: a server's front end and its helper processes make them here.

A family's module has ``make(config_json, files)``, which returns its `Processor` from the folder's JSON files.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from jaxinfer.images.expansion import within
from jaxinfer.images.processor import PROCESSOR_FILES, Processor

_NAMES = ("qwen", "clip", "siglip", "pixtral", "idefics3")
_QWEN, _CLIP, _SIGLIP, _PIXTRAL, _IDEFICS3 = (f"jaxinfer.images.{name}:make" for name in _NAMES)
MAKERS: Mapping[str, str] = {
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "LlavaForConditionalGeneration": _CLIP,
    "Gemma3ForConditionalGeneration": _SIGLIP,
    "Mistral3ForConditionalGeneration": _PIXTRAL,
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
}
"""``module:function`` that makes the processor of an architecture."""

_TOWERS = {"LlavaForConditionalGeneration": "clip_vision_model"}
"""Model type of the tower whose images are read, where an architecture may have several."""

_MOST_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class ProcessorSource:
    """What a processor is made of: plain data, which another process can make the same processor of.

    Attributes:
        make: ``module:function``, called with the other two.
        config: config.json of the folder.
        files: content of those `PROCESSOR_FILES` that the folder has, by name.
        rows: patch rows that the engine's largest encoder program has (`within`); None: any number.
        tokens: most tokens of a video (`within`); None: any number.
    """

    make: str
    config: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    rows: int | None = None
    tokens: int | None = None

    def processor(self) -> Processor:
        """Make the processor.

        Raises:
            ValueError: the files describe none that is supported; the message is one sentence.
        """
        module, _, name = self.make.partition(":")
        made: Processor = getattr(importlib.import_module(module), name)(self.config, self.files)
        return made if self.rows is None else within(made, self.rows, self.tokens)


def reader_of(config_json: Mapping[str, Any], known: Container[str]) -> str | None:
    """Return the architecture of a config.json that reads images, one of those ``known``; None: it reads text alone, or
    its tower is not supported."""
    named, vision = config_json.get("architectures"), config_json.get("vision_config")
    kind = vision.get("model_type") if isinstance(vision, Mapping) else None
    listed = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    return next((name for name in listed if name in known and _TOWERS.get(name, kind) == kind), None)


def find_source(folder: Path, makers: Mapping[str, str] = MAKERS) -> ProcessorSource | None:
    """Return the source of a folder's processor; None: its architecture reads no images, or it is no folder.

    Raises:
        ValueError: a file is not a JSON object.
    """
    config = _object(folder / "config.json")
    named = None if config is None else reader_of(config, makers)
    if config is None or named is None:
        return None
    found = {name: value for name in PROCESSOR_FILES if (value := _object(folder / name)) is not None}
    return ProcessorSource(makers[named], config, found)


def find_processor(folder: Path) -> Processor | None:
    """Return the processor of a model's folder, see `find_source`."""
    source = find_source(folder)
    return None if source is None else source.processor()


def _object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None: there is no such file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    try:
        value = json.loads(data) if len(data) <= _MOST_BYTES else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object of at most {_MOST_BYTES} bytes")
    return value
