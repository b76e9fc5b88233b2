"""Expansion of tokenised prompts: each placeholder becomes the tokens of its image or video."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.images.processor import ImageError, Processor
from jaxinfer.types import ImageInput, PlacedImage

VIDEO_TOKEN = "video_token"
"""Attribute of a processor: the placeholder of videos. A processor without it reads images alone."""


def placeholders(processor: Processor) -> tuple[int, ...]:
    """Return the ids in an expanded prompt that stand for rows: of images, and of videos if the model reads them."""
    row: int = getattr(processor, "row_token", processor.image_token)
    return (row, getattr(processor, VIDEO_TOKEN)) if reads_videos(processor) else (row,)


def reads_videos(processor: Processor) -> bool:
    """Return whether the processor's model reads videos."""
    return hasattr(processor, VIDEO_TOKEN)


def expanded(
    processor: Processor, ids: Sequence[int], images: Sequence[ImageInput]
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Replace the placeholders of images and of videos by the tokens of those given, in order.

    At both ends of an image, tokens become one where a tokenizer would have made one token of their texts
    (``processor.merges``): newlines of Gemma 3.

    Returns:
        The token ids, and each image at its range of positions, from its first row to its last.

    Raises:
        ImageError: the prompt has more or fewer placeholders, or the vocabulary lacks a token of images
            (`for_vocabulary`).
    """
    merges, rows = getattr(processor, "merges", {}), placeholders(processor)
    left = {token: iter(pieces) for token, pieces in _pieces(processor, ids, images).items()}
    if not images:
        return list(ids), ()
    made, ranges, was_image = list[int](), dict[int, tuple[int, int]](), False
    for token in ids:
        is_image = token in left
        rank, piece = next(left[token]) if is_image else (0, [token])
        if made and (is_image or was_image) and (one := merges.get((made[-1], piece[0]))) is not None:
            made[-1], piece = one, piece[1:]
        if is_image:
            at = [len(made) + index for index, each in enumerate(piece) if each in rows]
            ranges[rank] = (ranges.get(rank, at)[0], at[-1] + 1)
        made += piece
        was_image = is_image
    return made, tuple(PlacedImage(*at, images[rank]) for rank, at in ranges.items())


def pieces_of(processor: Any, image: ImageInput) -> list[list[int]]:
    """Return the tokens that replace each placeholder of an image or a video."""
    if image.video:
        pieces: list[list[int]] = processor.expand_video(image.grid)
        return pieces
    return [processor.expand(image.grid) if image.tiles is None else processor.expand_tiles(image.tiles)]


def _pieces(processor: Any, ids: Sequence[int], images: Sequence[ImageInput]) -> dict[int, list[tuple[int, list[int]]]]:
    """Return what replaces the placeholders of each kind, in order: numbers of images, and tokens."""
    pieces: dict[int, list[tuple[int, list[int]]]] = {processor.image_token: []}
    if reads_videos(processor):
        pieces[processor.video_token] = []
    for rank, image in enumerate(images):
        token = processor.video_token if image.video else processor.image_token
        pieces[token] += [(rank, piece) for piece in pieces_of(processor, image)]
    for token, wanted in pieces.items():
        if (found := ids.count(token)) != len(wanted):
            needed = f"{len(wanted)} are needed, for {len(images)} images"
            raise ImageError(f"{found} placeholders (token {token}), and {needed}")
    return pieces


def within(processor: Processor, rows: int, tokens: int | None = None) -> Processor:
    """Return the processor that makes larger images smaller, to about ``rows`` patch rows, where it has several sizes.
    The image of a very narrow picture may have more. Videos of more than ``tokens`` are refused."""
    bounded: Any = getattr(processor, "within", None)
    found: Any = processor if bounded is None else bounded(rows)
    return dataclasses.replace(found, most_tokens=tokens) if reads_videos(found) else found


def for_vocabulary(processor: Processor, id_of: Callable[[str], int | None]) -> Processor:
    """Return the processor with the token ids of a vocabulary, where it has tokens that config.json does not name.

    Args:
        id_of: looks up a token; None: it is absent. Then `Processor.expand` raises ImageError.
    """
    resolved: Any = getattr(processor, "with_tokens", None)
    found: Processor = processor if resolved is None else resolved(id_of)
    return found


def stamped(processor: Processor, text: str, videos: Sequence[tuple[int, float]]) -> str:
    """Return a prompt's text in which the placeholders of videos stand between the times of their frames, where the
    model reads those (Qwen3-VL).

    Args:
        videos: number of frames, and frames per second, of each.
    """
    own: Any = getattr(processor, "stamped", None)
    return text if own is None or not videos else own(text, videos)
