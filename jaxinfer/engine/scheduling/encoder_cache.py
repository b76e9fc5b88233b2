"""Rows of the device array that keeps the outputs of the vision encoder, by the content of images. No jax."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxinfer.types import ImageInput


class Encode(NamedTuple):
    """An image to encode before the prompt chunks of a step, and the rows of the cache that take its outputs."""

    image: ImageInput
    rows: Int32[np.ndarray, " outputs"]


class EncoderCache:
    """Images whose encoder outputs are on the device, the least recently used first.

    An image has any free rows: they need not follow each other. Programs run in the order of their launch, so an image
    is kept for the step that is being planned only: any later step may overwrite its rows.

    Args:
        size: rows of the device array.
        merged: patch rows that become one row of it.
    """

    def __init__(self, size: int, merged: int = 1) -> None:
        self._size, self._merged = size, merged
        self.reset()

    def reset(self) -> None:
        """Forget all images."""
        self._free = np.arange(self._size, dtype=np.int32)[::-1]  # a stack
        self._rows: OrderedDict[str, Int32[np.ndarray, " outputs"]] = OrderedDict()
        self._kept, self._ahead = set[str](), set[str]()
        self.encodes: list[Encode] = []
        """Images that the step must encode."""

    def begin(self) -> None:
        """Begin the plan of a step."""
        self._kept.clear()
        self.encodes = []

    def encodes_any(self, images: Iterable[ImageInput]) -> bool:
        """Return whether this step encodes one of these images."""
        return not {encode.image.digest for encode in self.encodes}.isdisjoint(image.digest for image in images)

    def cost(self, images: Iterable[ImageInput]) -> int | None:
        """Return the rows that must be encoded before these images can be read; None: this step has no room for them.
        If it has kept no image yet, it has room for as many as the array holds."""
        wanted = {image.digest: image for image in images}
        new = sum(self._outputs(image) for digest, image in wanted.items() if digest not in self._rows)
        held = sum(len(rows) for digest, rows in self._rows.items() if digest in self._kept or digest in wanted)
        return new if held + new <= self._size else None

    def keep(self, images: Iterable[ImageInput], *, ahead: bool = False) -> tuple[int, int]:
        """Keep images, for which there is room, for this step; encode those that are missing. Returns the numbers of
        images that were looked up for the first time in this step, and that were found.

        Args:
            ahead: for a chunk of a later step, whose own lookup does not count.
        """
        wanted = {image.digest: image for image in images if image.digest not in self._kept}
        self._kept |= wanted.keys()
        found = wanted.keys() & self._rows.keys()
        for digest in found:
            self._rows.move_to_end(digest)
        for digest, image in wanted.items():
            if digest not in found:
                self._rows[digest] = rows = self._take(self._outputs(image))
                self.encodes.append(Encode(image, rows))
        counted = set() if ahead else self._ahead & found
        self._ahead = self._ahead - found | (wanted.keys() if ahead else set())
        return len(wanted) - len(counted), len(found) - len(counted)

    def rows(self, image: ImageInput) -> Int32[np.ndarray, " outputs"]:
        """Return the rows of an image that is kept for this step."""
        return self._rows[image.digest]

    def check(self) -> None:
        """Raise AssertionError unless each row is free or belongs to one image."""
        used = np.concatenate([self._free, *self._rows.values()])
        if sorted(used.tolist()) != list(range(self._size)):
            raise AssertionError(f"{len(self._free)} rows are free and {len(used)} known, of {self._size}")

    def _outputs(self, image: ImageInput) -> int:
        return int(image.patches.shape[0]) // self._merged

    def _take(self, count: int) -> Int32[np.ndarray, " count"]:
        while len(self._free) < count:
            _, oldest = self._rows.popitem(last=False)  # never an image of this step: those are the newest
            self._free = np.concatenate([self._free, oldest])
        taken, self._free = self._free[-count:], self._free[:-count]
        return taken
