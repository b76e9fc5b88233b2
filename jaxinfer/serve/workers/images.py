"""Task of workers: decoding and resizing of images and frames, which are untrusted files. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL.Image import Image

from jaxinfer.images.decode import ImageLimits, decode_picture
from jaxinfer.images.processor import ImageError, VideoProcessor
from jaxinfer.images.registry import ProcessorSource
from jaxinfer.images.source import data_of
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.workers.codec import decode
from jaxinfer.types import ImageInput

type Encoded = tuple[memoryview | bytes, str, list[int], dict[str, Any]]
"""Patches with their dtype and shape, and the other fields of an image."""


def preparer(source: Mapping[str, Any], limits: tuple[int, int]) -> Callable[[bytes], Encoded]:
    """Return the function that prepares an encoded image: its field, data URL or bytes, and processor options. A video
    is a list of data URLs or bytes.

    Args:
        source: fields of `ProcessorSource`.
        limits: `ImageLimits`.
    """
    processor, bounds = ProcessorSource(**source).processor(), ImageLimits(*limits)

    def picture_at(field: str, given: str | bytes) -> Image:
        try:
            return decode_picture(data_of(given, bounds) if isinstance(given, str) else given, bounds)
        except ImageError as error:
            raise RequestError(field, f": {error}") from error

    def prepare(question: bytes) -> Encoded:
        field, given, options = decode(question)
        try:
            if not (isinstance(given, list) and isinstance(processor, VideoProcessor)):
                return encoded(processor.prepare(picture_at(field, given), **options))
            frames = (picture_at(f"{field}[{rank}]", frame) for rank, frame in enumerate(given))
            return encoded(processor.prepare_video(frames, len(given), **options))
        except ImageError as error:
            raise RequestError(field, f": {error}{f' (options {options})' if options else ''}") from error

    return prepare


def encoded(image: ImageInput) -> Encoded:
    """Return an image as plain data, whose patches are not copied."""
    patches = np.ascontiguousarray(image.patches)
    others = {field.name: getattr(image, field.name) for field in dataclasses.fields(image) if field.name != "patches"}
    return memoryview(patches).cast("B"), str(patches.dtype), list(patches.shape), others


def decoded(plain: Encoded) -> ImageInput:
    """Return the image of plain data, see `encoded`; the patches are read-only."""
    data, dtype, shape, others = plain
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in others.items()
    }
    return ImageInput(np.frombuffer(data, dtype).reshape(shape), **fields)
