"""Task of workers: decoding and resizing of images, which are untrusted files. No jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxinfer.images.decode import ImageLimits
from jaxinfer.images.processor import ImageError
from jaxinfer.images.registry import ProcessorSource
from jaxinfer.images.source import data_of, decode_picture
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.workers.codec import decode
from jaxinfer.types import ImageInput

type Encoded = tuple[memoryview, str, list[int], list[int], str]
"""Patches with their dtype and shape, grid and digest of an image."""


def preparer(source: Mapping[str, Any], limits: tuple[int, int]) -> Callable[[bytes], Encoded]:
    """Return the function that prepares an encoded image: its field, data URL or bytes, and processor options.

    Args:
        source: fields of `ProcessorSource`.
        limits: `ImageLimits`.
    """
    processor, bounds = ProcessorSource(**source).processor(), ImageLimits(*limits)

    def prepare(question: bytes) -> Encoded:
        field, given, options = decode(question)
        try:
            data = data_of(given, bounds) if isinstance(given, str) else given
            return encoded(processor.prepare(decode_picture(data, bounds), **options))
        except ImageError as error:
            raise RequestError(field, f": {error}") from error

    return prepare


def encoded(image: ImageInput) -> Encoded:
    """Return an image as plain data, whose patches are not copied."""
    patches = np.ascontiguousarray(image.patches)
    data = memoryview(patches).cast("B")
    return data, str(patches.dtype), list(patches.shape), list(image.grid), image.digest


def decoded(plain: tuple[bytes, str, list[int], list[int], str]) -> ImageInput:
    """Return the image of plain data, see `encoded`; the patches are read-only."""
    data, dtype, shape, (frames, rows, columns), digest = plain
    return ImageInput(np.frombuffer(data, dtype).reshape(shape), (frames, rows, columns), digest)
