"""Expansion of tokenised prompts: each placeholder becomes the tokens of its image or video."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.images.processor import ImageError, Processor, VideoProcessor
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import ImageInput, PlacedImage


def placeholders(processor: Processor) -> tuple[int, ...]:
    """Return the ids in an expanded prompt that stand for rows: of images, and of videos if the model reads them."""
    row: int = getattr(processor, "row_token", processor.image_token)
    return (row, processor.video_token) if isinstance(processor, VideoProcessor) else (row,)


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
    made, ranges, done = list[int](), dict[int, tuple[int, int]](), 0
    for at in np.flatnonzero(np.isin(np.asarray(ids), list(left))).tolist() if images else ():
        _join(made, ids[done:at], merges)
        rank, piece = next(left[ids[at]])
        _join(made, piece, merges)
        own = [len(made) - len(piece) + index for index, each in enumerate(piece) if each in rows]
        ranges[rank] = (ranges.get(rank, own)[0], own[-1] + 1)
        done = at + 1
    _join(made, ids[done:], merges)
    return made, tuple(PlacedImage(*at, images[rank]) for rank, at in ranges.items())


def _join(made: list[int], piece: Sequence[int], merges: Mapping[tuple[int, int], int]) -> None:
    """Append tokens, of which the first and the one before it may become one."""
    if made and piece and (one := merges.get((made[-1], piece[0]))) is not None:
        made[-1], piece = one, piece[1:]
    made += piece


def _pieces(
    processor: Processor, ids: Sequence[int], images: Sequence[ImageInput]
) -> dict[int, list[tuple[int, list[int]]]]:
    """Return what replaces the placeholders of each kind, in order: numbers of images, and tokens."""
    tokens = {False: processor.image_token}
    if isinstance(processor, VideoProcessor):
        tokens[True] = processor.video_token
    pieces: dict[int, list[tuple[int, list[int]]]] = {token: [] for token in tokens.values()}
    for rank, image in enumerate(images):
        pieces[tokens[image.video]] += [(rank, piece) for piece in processor.expand(image)]
    for token, wanted in pieces.items():
        if (found := ids.count(token)) != len(wanted):
            needed = f"{len(wanted)} are needed, for {len(images)} images"
            raise ImageError(f"{found} placeholders (token {token}), and {needed}")
    return pieces


def within(processor: Processor, rows: int, tokens: int | None = None) -> Processor:
    """Return the processor that makes larger images smaller, to about ``rows`` patch rows, where it has several sizes.
    The image of a very narrow picture may have more. Videos of more than ``tokens`` are refused."""
    bounded: Any = getattr(processor, "within", None)
    if bounded is None:
        return processor
    found: Processor = bounded(rows, tokens) if isinstance(processor, VideoProcessor) else bounded(rows)
    return found


def for_vocabulary(processor: Processor, id_of: Callable[[str], int | None]) -> Processor:
    """Return the processor with the token ids of a vocabulary, where it has tokens that config.json does not name.

    Args:
        id_of: looks up a token; None: it is absent. Then `Processor.expand` raises ImageError.
    """
    resolved: Any = getattr(processor, "with_tokens", None)
    found: Processor = processor if resolved is None else resolved(id_of)
    return found
