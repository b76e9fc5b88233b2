"""Image processor of LLaVA: the middle square of a picture, as CLIP reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from jaxinfer.images.patches import SquareProcessor, patch_settings, sides, token_id, tower_sizes
from jaxinfer.images.pixels import channel_numbers, require, value_table

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_LLAVA = "LlavaImageProcessor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipProcessor(SquareProcessor):
    """See `jaxinfer.images.processor.Processor`.

    Attributes:
        size: sides to which a picture is resized before its middle is cut out: the shorter one, or height and width.
        background: colour with which a picture is first padded to a square; None: it is not.
    """

    size: tuple[int, ...]
    background: tuple[int, ...] | None = None

    def square(self, picture: Image.Image) -> np.ndarray:
        if self.background is not None:
            picture = _padded(picture, self.background)
        return _middle(self.resized(picture, *self._size(picture)), self.side)

    def _size(self, picture: Image.Image) -> tuple[int, int]:
        """Return height and width of the resized picture."""
        if len(self.size) == 2:
            return self.size[0], self.size[1]
        short, long = sorted(picture.size)
        sides = self.size[0], int(self.size[0] * long / short)
        return (sides[1], sides[0]) if picture.width <= picture.height else sides


def _padded(picture: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    side = max(picture.size)
    square = Image.new("RGB", (side, side), (colour[0], colour[1], colour[2]))
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


def _middle(pixels: np.ndarray, side: int) -> np.ndarray:
    """Cut the middle out of pixels [height, width, 3]; a smaller picture is padded with black."""
    short = [max(side - length, 0) for length in pixels.shape[:2]]
    pixels = np.pad(pixels, [*[((by + 1) // 2, by // 2) for by in short], (0, 0)])
    top, left = ((length - side) // 2 for length in pixels.shape[:2])
    return pixels[top : top + side, left : left + side]


def make(config_json: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> ClipProcessor:
    """Make the processor of a LlavaForConditionalGeneration from config.json and the folder's other JSON files.

    Raises:
        ValueError: a setting is invalid or not supported; the message names it.
    """
    side, patch = tower_sizes(config_json, {"image_size": 224, "patch_size": 32})
    settings, resample = patch_settings(files, ("CLIPImageProcessor", _LLAVA), Image.Resampling.BICUBIC)
    size = sides(settings, "size", {"shortest_edge": side}, "shortest_edge")
    edges = next((names for names in (("shortest_edge",), ("height", "width")) if set(names) == set(size)), None)
    require(edges is not None, settings, "size", "must have shortest_edge, or height and width")
    shape = sides(settings, "crop_size", {"height": side, "width": side})
    where = "crop_size" if settings.get("do_center_crop") is not False else "size"
    shape = shape if where == "crop_size" else size
    require(shape == {"height": side, "width": side}, settings, where, f"is not the tower's image_size, {side}")
    padded = settings.get("do_pad") is True
    known = not padded or str(settings.get("image_processor_type")).startswith(_LLAVA)
    require(known, settings, "do_pad", f"is supported for {_LLAVA} only")
    background = tuple(int(value * 255) for value in channel_numbers(settings, "image_mean", CLIP_MEAN))
    return ClipProcessor(
        image_token=token_id(config_json, "image_token", 32000),
        patch=patch,
        resample=resample,
        values=value_table(settings, CLIP_MEAN, CLIP_STD),
        side=side,
        size=tuple(size[edge] for edge in edges or ()),
        background=background if padded else None,
    )
