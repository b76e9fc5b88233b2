"""Image processor of Gemma 3: a picture stretched to a square, as SigLIP reads it, between two tokens and newlines."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

from PIL import Image

from jaxinfer.images.patches import SquareProcessor, patch_settings, positive, sides, token_id, tower_sizes
from jaxinfer.images.pixels import require, value_table
from jaxinfer.images.processor import ImageError

_HALF = (0.5, 0.5, 0.5)
_NEWLINES = tuple(range(107, 138))  # of the vocabulary of Gemma 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiglipProcessor(SquareProcessor):
    """See `jaxinfer.images.processor.Processor`. The placeholder in a prompt is the token that begins an image.

    Attributes:
        row_token, end_token: tokens that stand for the rows of an image, and that ends it.
        newlines: tokens of one newline, of two, and so on.
    """

    row_token: int = dataclasses.field(repr=False)
    end_token: int = dataclasses.field(repr=False)
    newlines: tuple[int, ...] = dataclasses.field(default=_NEWLINES, repr=False)

    def with_tokens(self, id_of: Callable[[str], int | None]) -> Self:
        """Return the processor for a vocabulary, in which ``id_of`` looks up a token; None: it is absent."""
        found = list[int]()
        while (one := id_of("\n" * (len(found) + 1))) is not None:
            found.append(one)
        return dataclasses.replace(self, newlines=tuple(found))

    @functools.cached_property
    def merges(self) -> Mapping[tuple[int, int], int]:
        """Pairs of tokens that are one: newlines of the prompt and of an image, or of two images, come together."""
        runs = list(enumerate(self.newlines, 1))
        most = len(runs)
        return {(a, b): self.newlines[i + j - 1] for i, a in runs for j, b in runs if i + j <= most}

    def of_square(self) -> list[int]:
        if len(self.newlines) < 2:
            raise ImageError("the vocabulary has no token of two newlines, which are around an image")
        soft = [self.row_token] * len(super().of_square())
        return [self.newlines[1], self.image_token, *soft, self.end_token, self.newlines[1]]


def make(config_json: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> SiglipProcessor:
    """Make the processor of a Gemma3ForConditionalGeneration from config.json and the folder's other JSON files.

    Raises:
        ValueError: a setting is invalid or not supported; the message names it.
    """
    side, patch = tower_sizes(config_json, {"image_size": 224, "patch_size": 16})
    settings, resample = patch_settings(files, ("Gemma3ImageProcessor",), Image.Resampling.BILINEAR)
    size = sides(settings, "size", {"height": side, "width": side})
    require(size == {"height": side, "width": side}, settings, "size", f"is not the tower's image_size, {side}")
    for name in ("do_pan_and_scan", "do_center_crop", "do_pad"):
        require(not settings.get(name), settings, name, "is not supported")
    tokens, patches = positive(config_json, "mm_tokens_per_image", 256), side // patch
    merge = patches // math.isqrt(tokens)
    if not merge or merge**2 * tokens != patches**2:
        what = f"must be the square of a divisor of {patches}, the patches of an image's side"
        raise ValueError(f"config.json: mm_tokens_per_image = {tokens} {what}")
    return SiglipProcessor(
        image_token=token_id(config_json, "boi_token", 255_999),
        patch=patch,
        merge=merge,
        resample=resample,
        values=value_table(settings, _HALF, _HALF),
        side=side,
        row_token=token_id(config_json, "image_token", 262_144),
        end_token=token_id(config_json, "eoi_token", 256_000),
    )
