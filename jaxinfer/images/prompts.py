"""Offline prompts with images: ``{"prompt": ..., "images": [...]}``, and what an engine gets of them."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxinfer.images.processor import ImageError, Processor
from jaxinfer.images.source import picture_of
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import ImageInput

_TEXTS = ("prompt", "prompt_token_ids")
_MEDIA, _OPTIONS = "multi_modal_data", "mm_processor_kwargs"
_FIELDS = (*_TEXTS, "images", _MEDIA, _OPTIONS)


class HeldImage(NamedTuple):
    """An image of an offline prompt.

    Attributes:
        field: its place in the call, for errors.
        source: see `picture_of`.
        options: options of the processor.
    """

    field: str
    source: Any
    options: Mapping[str, Any] = {}

    def prepared(self, processor: Processor) -> ImageInput:
        """Return the image as the tower reads it.

        Raises:
            RequestError: it cannot be read, or an option is not supported; names its field.
        """
        try:
            return processor.prepare(picture_of(self.source), **self.options)
        except ImageError as error:
            raise RequestError(self.field, f": {error}") from error


@dataclasses.dataclass(frozen=True)
class ImagePrompt:
    """A prompt with images.

    Attributes:
        prompt: text or token ids, in which each image is one placeholder.
    """

    prompt: str | Sequence[int]
    images: Sequence[HeldImage] = ()


def image_prompt(prompt: Mapping[str, Any]) -> ImagePrompt:
    """Read a prompt given as an object: ``prompt`` or ``prompt_token_ids``, with ``images``, or with vLLM's
    ``multi_modal_data`` and ``mm_processor_kwargs``.

    Raises:
        RequestError: a field is unknown or missing, or has a wrong type.
    """
    for name in prompt:
        if name not in _FIELDS:
            raise RequestError(str(name), f"is no field of a prompt: they are {', '.join(_FIELDS)}")
    texts = [prompt[name] for name in _TEXTS if prompt.get(name) is not None]
    if len(texts) != 1:
        raise RequestError("prompt", f"must be given once: as one of {', '.join(_TEXTS)}")
    options = prompt.get(_OPTIONS) or {}
    if not isinstance(options, Mapping):
        raise RequestError(_OPTIONS, f"={reprlib.repr(options)} must be an object")
    return ImagePrompt(texts[0], [HeldImage(field, source, options) for field, source in _sources(prompt)])


def _sources(prompt: Mapping[str, Any]) -> list[tuple[str, Any]]:
    media = prompt.get(_MEDIA) or {}
    if not isinstance(media, Mapping) or media.keys() - {"image"}:
        raise RequestError(_MEDIA, f"={reprlib.repr(media)[:200]} must be an object with image alone")
    given = {"images": prompt.get("images"), f"{_MEDIA}.image": media.get("image")}
    found = [(field, value) for field, value in given.items() if value is not None]
    if len(found) > 1:
        raise RequestError("images", f"and {_MEDIA} exclude each other")
    for field, value in found:
        listed = value if isinstance(value, list | tuple) else [value]
        return [(f"{field}[{rank}]", each) for rank, each in enumerate(listed)]
    return []
