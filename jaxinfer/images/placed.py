"""Places of images in tokenised prompts: each placeholder becomes the tokens of its image."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.images.expansion import expanded
from jaxinfer.images.processor import ImageError, Processor
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import ImageInput, PlacedImage


def place_images(
    field: str, ids: Sequence[int], processor: Processor, images: Sequence[ImageInput]
) -> tuple[Sequence[int], tuple[PlacedImage, ...]]:
    """Return a prompt in which each placeholder is replaced by the tokens of its image, and its images.

    Args:
        field: field of the request that has the prompt, for errors.
        ids: token ids in which each image is one token, as chat templates write it, and each video one token, or one
            for each pair of frames (Qwen3-VL).

    Raises:
        RequestError: the prompt has more or fewer placeholders than there are images, or the vocabulary lacks a token
            of images.
    """
    ids = list(ids)
    try:
        made, placed = expanded(processor, ids, images)
    except ImageError as error:
        raise RequestError(field, f": {error}") from error
    return made, placed
