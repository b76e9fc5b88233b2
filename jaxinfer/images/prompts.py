"""Offline prompts with images and videos: ``{"prompt": ..., "images": [...]}``, and what an engine gets of them."""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from jaxinfer.images.processor import ImageError, Processor, VideoProcessor, options_for
from jaxinfer.images.source import picture_of
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import ImageInput

_TEXTS = ("prompt", "prompt_token_ids")
_VIDEOS = 5  # dimensions of an array of videos
_NO_FRAMES = (str, bytes, os.PathLike, Mapping)
_MEDIA, _OPTIONS = "multi_modal_data", "mm_processor_kwargs"
_KINDS = {"images": ("image", False), "videos": ("video", True)}
_FIELDS = (*_TEXTS, *_KINDS, _MEDIA, _OPTIONS)


class HeldImage(NamedTuple):
    """An image or a video of an offline prompt.

    Attributes:
        field: its place in the call, for errors.
        source: see `picture_of`; of a video, a list of these or an array of all its frames.
        options: options of the processor.
        video: it is a video.
    """

    field: str
    source: Any
    options: Mapping[str, Any] = {}
    video: bool = False

    def timing(self, processor: VideoProcessor) -> tuple[int, float]:
        """Return the number of frames of a video, and frames per second.

        Raises:
            RequestError: it is no list of frames, or there are too many; names its field.
        """
        if isinstance(self.source, _NO_FRAMES) or not hasattr(self.source, "__len__"):
            raise RequestError(self.field, "is no list of frames: containers such as MP4 are not decoded")
        count, fps = len(self.source), options_for(True, self.options)["fps"]
        try:
            processor.timestamps(count, fps)
        except ImageError as error:
            raise RequestError(self.field, f": {error}") from error
        return count, fps

    def prepared(self, processor: Processor) -> ImageInput:
        """Return the image as the tower reads it.

        Raises:
            RequestError: it cannot be read, or an option is not supported; names its field.
        """
        options = options_for(self.video, self.options)
        try:
            if self.video and isinstance(processor, VideoProcessor):
                return processor.prepare_video(map(picture_of, self.source), len(self.source), **options)
            return processor.prepare(picture_of(self.source), **options)
        except ImageError as error:
            raise RequestError(self.field, f": {error}") from error


@dataclasses.dataclass(frozen=True)
class ImagePrompt:
    """A prompt with images and videos.

    Attributes:
        prompt: text or token ids, in which each image is one placeholder.
    """

    prompt: str | Sequence[int]
    images: Sequence[HeldImage] = ()


def bare_prompt(prompt: str | Sequence[int] | ImagePrompt) -> str | Sequence[int]:
    """Return the text or the token ids of a prompt."""
    return prompt.prompt if isinstance(prompt, ImagePrompt) else prompt


def image_prompt(prompt: Mapping[str, Any]) -> ImagePrompt:
    """Read a prompt given as an object: ``prompt`` or ``prompt_token_ids``, with ``images`` and ``videos`` or vLLM's
    ``multi_modal_data``, and with ``mm_processor_kwargs``.

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
    media = prompt.get(_MEDIA) or {}
    if not isinstance(media, Mapping) or media.keys() - {kind for kind, _ in _KINDS.values()}:
        raise RequestError(_MEDIA, f"={reprlib.repr(media)[:200]} must be an object with image and video alone")
    held = []
    for name, (kind, video) in _KINDS.items():
        given = {name: prompt.get(name), f"{_MEDIA}.{kind}": media.get(kind)}
        found = [(field, value) for field, value in given.items() if value is not None]
        if len(found) > 1:
            raise RequestError(name, f"and {_MEDIA} exclude each other")
        for field, value in found:
            listed = value if (_several(value) if video else isinstance(value, list | tuple)) else [value]
            held += [HeldImage(f"{field}[{rank}]", each, options, video) for rank, each in enumerate(listed)]
    return ImagePrompt(texts[0], held)


def with_timestamps[T: str | Sequence[int]](prompt: T, images: Sequence[HeldImage], processor: Processor) -> T:
    """Return a prompt, a text with the timestamps of videos where the model reads them.

    Raises:
        RequestError: there are videos, and the model reads images alone; or see `HeldImage.timing`.
    """
    videos = [image for image in images if image.video]
    if not videos:
        return prompt
    if not isinstance(processor, VideoProcessor):
        raise RequestError(videos[0].field, "is a video, and the model reads images alone")
    timings = [video.timing(processor) for video in videos]
    return cast(T, processor.with_timestamps(prompt, timings)) if isinstance(prompt, str) else prompt


def _several(value: Any) -> bool:
    """Return whether a value is a list of videos, not of the frames of one."""
    if getattr(value, "ndim", 0) == _VIDEOS:
        return True
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, list | tuple) or getattr(first, "ndim", 0) == _VIDEOS - 1
