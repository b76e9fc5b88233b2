"""Expansion of tokenised prompts: each placeholder becomes the tokens of its image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxinfer.images.processor import Processor


def expanded(
    processor: Processor, ids: Iterable[int], grids: Sequence[tuple[int, int, int]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Replace the k-th placeholder by the tokens of an image of the k-th grid.

    At both ends of an image, tokens become one where a tokenizer would have made one token of their texts
    (``processor.merges``): newlines of Gemma 3.

    Returns:
        The token ids, and for each image the range of positions from its first row to its last.

    Raises:
        ImageError: the vocabulary lacks a token of images (`for_vocabulary`).
    """
    merges, row = getattr(processor, "merges", {}), getattr(processor, "row_token", processor.image_token)
    made, ranges, left, was_image = list[int](), list[tuple[int, int]](), iter(grids), False
    for token in ids:
        is_image = token == processor.image_token
        piece = processor.expand(next(left)) if is_image else [token]
        if made and (is_image or was_image) and (one := merges.get((made[-1], piece[0]))) is not None:
            made[-1], piece = one, piece[1:]
        if is_image:
            end = len(made) + len(piece)
            ranges.append((len(made) + piece.index(row), end - piece[::-1].index(row)))
        made += piece
        was_image = is_image
    return made, ranges


def within(processor: Processor, rows: int) -> Processor:
    """Return the processor that makes larger images smaller, to about ``rows`` patch rows, where it has several sizes.
    The image of a very narrow picture may have more."""
    bounded: Any = getattr(processor, "within", None)
    found: Processor = processor if bounded is None else bounded(rows)
    return found


def for_vocabulary(processor: Processor, id_of: Callable[[str], int | None]) -> Processor:
    """Return the processor with the token ids of a vocabulary, where it has tokens that config.json does not name.

    Args:
        id_of: looks up a token; None: it is absent. Then `Processor.expand` raises ImageError.
    """
    resolved: Any = getattr(processor, "with_tokens", None)
    found: Processor = processor if resolved is None else resolved(id_of)
    return found
