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
    """Return a prompt in which the k-th placeholder is replaced by the tokens of the k-th image, and its images.

    Args:
        field: field of the request that has the prompt, for errors.
        ids: token ids in which each image is one token, as chat templates write it.

    Raises:
        RequestError: the prompt has more or fewer placeholders than there are images, or the vocabulary lacks a token
            of images.
    """
    ids, token = list(ids), processor.image_token
    if (found := ids.count(token)) != len(images):
        reason = f"has {found} placeholders of images (token {token}), and {len(images)} images are given"
        raise RequestError(field, reason)
    if not images:
        return ids, ()
    try:
        made, ranges = expanded(processor, ids, [image.grid for image in images])
    except ImageError as error:
        raise RequestError(field, f"has images, and {error}") from error
    return made, tuple(PlacedImage(*at, image) for at, image in zip(ranges, images, strict=True))
