"""Image processor of Mistral's vision models: any shape, within a bound on the longer side; a token ends each row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from PIL import Image

from jaxinfer.images.clip import CLIP_MEAN, CLIP_STD
from jaxinfer.images.patches import PatchProcessor, patch_settings, pixel_bounds, positive, sides, token_id, tower_sizes
from jaxinfer.images.pixels import require, value_table
from jaxinfer.images.processor import ImageError
from jaxinfer.types import ImageInput

_EDGE = "longest_edge"
_TOKENS = ("[IMG_BREAK]", "[IMG_END]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixtralProcessor(PatchProcessor):
    """See `jaxinfer.images.processor.Processor`.

    Attributes:
        bounds: the most pixels of height and width; a larger picture is made smaller with the same aspect ratio.
        break_token, end_token: tokens after a row of an image, and after the last one; None: the vocabulary lacks them.
    """

    bounds: tuple[int, int]
    break_token: int | None = dataclasses.field(default=12, repr=False)
    end_token: int | None = dataclasses.field(default=13, repr=False)

    def with_tokens(self, id_of: Callable[[str], int | None]) -> Self:
        """Return the processor for a vocabulary, in which ``id_of`` looks up a token; None: it is absent."""
        after_row, after_image = map(id_of, _TOKENS)
        return dataclasses.replace(self, break_token=after_row, end_token=after_image)

    def within(self, rows: int) -> Self:
        """See `jaxinfer.images.expansion.within`."""
        side = max(math.isqrt(rows) // self.merge, 1) * self.unit
        height, width = self.bounds
        return dataclasses.replace(self, bounds=(min(height, side), min(width, side)))

    @property
    def unit(self) -> int:
        """Pixels of the side of a token."""
        return self.patch * self.merge

    @property
    def most_rows(self) -> int:
        return math.prod(-(-bound // self.unit) * self.merge for bound in self.bounds)

    def expand(self, image: ImageInput) -> list[list[int]]:
        if self.break_token is None or self.end_token is None:
            raise ImageError(f"the vocabulary must have the tokens {' and '.join(_TOKENS)}")
        row = [self.image_token] * (image.grid[2] // self.merge) + [self.break_token]
        return [[*(row * (image.grid[1] // self.merge))[:-1], self.end_token]]

    def pixels(self, picture: Image.Image, /, **options: Any) -> np.ndarray:
        bounds = self._bounds(options)
        height, width = picture.height, picture.width
        ratio = max(height / bounds[0], width / bounds[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return self.resized(picture, *(-(-side // self.unit) * self.unit for side in (height, width)))

    def _bounds(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the bounds of a request: ``max_pixels`` are those of the largest square of whole tokens."""
        most = pixel_bounds(options, ("max_pixels",)).get("max_pixels")
        if most is None:
            return self.bounds
        side = max(math.isqrt(most) // self.unit, 1) * self.unit
        return min(self.bounds[0], side), min(self.bounds[1], side)


def make(config_json: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> PixtralProcessor:
    """Make the processor of a Mistral3ForConditionalGeneration from config.json and the folder's other JSON files.

    Raises:
        ValueError: a setting is invalid or not supported; the message names it.
    """
    (patch,) = tower_sizes(config_json, {"patch_size": 16})
    settings, resample = patch_settings(files, ("PixtralImageProcessor",), Image.Resampling.BICUBIC)
    require(not settings.get("do_center_crop"), settings, "do_center_crop", "is not supported")
    size = sides(settings, "size", {_EDGE: 1024}, _EDGE)
    known = set(size) in ({_EDGE}, {"height", "width"})
    require(known, settings, "size", f"must have {_EDGE}, or height and width")
    return PixtralProcessor(
        image_token=token_id(config_json, "image_token", 10),
        patch=patch,
        merge=positive(config_json, "spatial_merge_size", 2),
        resample=resample,
        values=value_table(settings, CLIP_MEAN, CLIP_STD),
        bounds=(size.get(_EDGE, size.get("height", 0)), size.get(_EDGE, size.get("width", 0))),
    )
