"""Images of a prompt as the scheduler and the runner need them, validated. No jax."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int, Int32

from jaxinfer.config import ResolvedEngine
from jaxinfer.config.images import ImageNeeds
from jaxinfer.kv.radix import Mark
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import ImageInput, PlacedImage, Request

PlaceAxes = Callable[[Sequence[int], Sequence[PlacedImage]], Int[np.ndarray, "3 length"]]
"""Rotary positions on three axes of a prompt's tokens."""

TEXT = -1
"""Image of a token that is text."""


class PromptImages:
    """The images of a valid prompt, shared by all samples of a request.

    Args:
        placed: in order, without overlap. Of a video, each frame is encoded and cached by itself.
        axes: rotary positions on three axes; None: the model has one.

    Attributes:
        places: positions of all placeholders, ascending.
        marks: images by their ranges, for the keys of pages.
        spans: ranges of placeholders that no chunk may split.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        placed: Sequence[PlacedImage],
        needs: ImageNeeds,
        axes: PlaceAxes | None = None,
    ) -> None:
        self._prompt, self._placed, self._axes = prompt, placed, axes
        ids = np.asarray(prompt, np.int32)
        of_each = [start + np.flatnonzero(np.isin(ids[start:stop], needs.tokens)) for start, stop, _ in placed]
        self._frames = [frame for each in placed for frame in each.image.frames]
        counts = [frame.patches.shape[0] // needs.merged for frame in self._frames]
        self._firsts = np.cumsum([0, *counts])
        self.places = np.concatenate(of_each)
        self._owners = np.repeat(np.arange(len(counts)), counts)
        self.marks = [Mark(start, stop, image.digest) for start, stop, image in placed]
        whole = of_each if needs.both_ways else []
        self.spans = [(int(places[0]), int(places[-1]) + 1) for places in whole]

    def within(self, start: int, stop: int) -> list[ImageInput]:
        """Return the images and frames of which the tokens of a range are placeholders."""
        first, last = np.searchsorted(self.places, (start, stop))
        return [self._frames[index] for index in np.unique(self._owners[first:last])]

    def rows(
        self, start: int, stop: int, of_image: Callable[[ImageInput], Int32[np.ndarray, " outputs"]]
    ) -> Int32[np.ndarray, " tokens"]:
        """Return the row of the encoder cache for each token of a range; -1: it is text."""
        rows = np.full(stop - start, TEXT, np.int32)
        first, last = np.searchsorted(self.places, (start, stop))
        for index in np.unique(self._owners[first:last]):
            begin, end = max(first, self._firsts[index]), min(last, self._firsts[index + 1])
            own = of_image(self._frames[index])[begin - self._firsts[index] : end - self._firsts[index]]
            rows[self.places[begin:end] - start] = own
        return rows

    def ends(self, start: int, stop: int) -> Int32[np.ndarray, " tokens"]:
        """Return the last position that each token of a range sees: that of its image, or its own."""
        ends = np.arange(start, stop, dtype=np.int32)
        for first, last in self.spans:
            ends[max(first - start, 0) : max(last - start, 0)] = last - 1
        return ends

    @functools.cached_property
    def _prompt_axes(self) -> Int[np.ndarray, "3 length"] | None:
        return None if self._axes is None else np.asarray(self._axes(self._prompt, self._placed), np.int32)

    @functools.cached_property
    def shift(self) -> int:
        """What is added to the position of a token after the prompt for its rotary position, on all axes."""
        axes = self._prompt_axes
        return 0 if axes is None else int(axes.max()) + 1 - axes.shape[1]

    def axes(self, start: int, stop: int) -> Int32[np.ndarray, "3 tokens"]:
        """Return the rotary positions of a range of the prompt and of generated tokens after it."""
        known = self._prompt_axes
        assert known is not None
        later = np.arange(max(start, known.shape[1]), max(stop, known.shape[1]), dtype=np.int32) + self.shift
        return np.concatenate([known[:, start:stop], np.broadcast_to(later, (3, len(later)))], axis=1)


def images_of(request: Request, engine: ResolvedEngine, axes: PlaceAxes | None = None) -> PromptImages | None:
    """Return the images of a request; None: it has none.

    Raises:
        RequestError: an image cannot be served, or the prompt has not the placeholders that it needs.
    """
    needs, placed = engine.images, request.images
    if needs is None:
        if placed:
            raise RequestError("images", f": {len(placed)} were given, and this engine serves text alone")
        return None
    _require_range(request)
    for number, each in enumerate(placed):
        _require_image(f"images[{number}]", each, request.prompt_token_ids, engine, needs)
    prompt = np.asarray(request.prompt_token_ids, np.int32)
    known = np.zeros(len(prompt), np.bool_)
    for start, stop, _ in placed:
        known[start:stop] = True
    wrong = np.flatnonzero(np.isin(prompt, needs.tokens) & ~known)
    if len(wrong):
        found = prompt[wrong[0]]
        raise RequestError("prompt", f": token {wrong[0]} is a placeholder ({found}) without an image")
    if not placed:
        return None
    if prompt[-1] in needs.tokens:
        raise RequestError("prompt", f"ends with a placeholder ({prompt[-1]}): a token of text must follow an image")
    for kind, most in engine.mm_limits.items():
        count = sum(each.image.video == (kind == "video") for each in placed)
        if count > most:
            raise RequestError("images", f": {count} are more than limit_mm_per_prompt = {kind}={most}")
    return PromptImages(request.prompt_token_ids, placed, needs, axes)


def _require_range(request: Request) -> None:
    """Raise RequestError unless the images are in order, within the prompt, without overlap."""
    bounds = [0, *itertools.chain.from_iterable((each.start, each.stop) for each in request.images)]
    ends = (*bounds, len(request.prompt_token_ids))
    if any(before > after for before, after in itertools.pairwise(ends)):
        ranges = [(each.start, each.stop) for each in request.images]
        raise RequestError("images", f": ranges {ranges} overlap, or are not in the order of the prompt")


def _require_image(
    field: str, placed: PlacedImage, prompt: Sequence[int], engine: ResolvedEngine, needs: ImageNeeds
) -> None:
    image, patches = placed.image, placed.image.patches
    rows, frames, largest = patches.shape[0], image.grid[0], engine.encoder_sizes[-1]
    if patches.dtype != np.uint8 or patches.shape[1:] != (needs.values,):
        found = f"{patches.dtype}{list(patches.shape)}"
        raise RequestError(field, f": patches are {found}, not uint8[rows, {needs.values}]")
    if not rows or rows != math.prod(image.grid) or rows % (frames * needs.merged):
        raise RequestError(field, f": {rows} patch rows are not those of a grid of {image.grid}")
    if not image.digest:
        raise RequestError(field, "has no digest")
    if (encoded := rows // frames) > largest:
        raise RequestError(field, f": {encoded} patch rows are more than the largest encoder program takes ({largest})")
    own = np.asarray(prompt[placed.start : placed.stop])
    tokens, wanted = int(np.isin(own, needs.tokens).sum()), rows // needs.merged
    if tokens != wanted:
        raise RequestError(field, f"has {tokens} placeholders {needs.tokens} in the prompt, and needs {wanted}")
