"""Image processor for tests of everything around it: no resizing, a patch is a pixel, a token is 2 x 2 of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL.Image import Image

from jaxinfer.images.pixels import rgb
from jaxinfer.images.processor import ImageError, digest_of
from jaxinfer.images.registry import ProcessorSource
from jaxinfer.types import ImageInput

IMAGE = 259
"""Placeholder, the first id behind those of `tests.serve.fake_engine`."""
FAKE = "tests.fake_vision_processor:make"
HANGS, GREEDY = 7, 9
"""Widths of pictures, two pixels high, on which the processor does not return, and allocates without bound."""


@dataclasses.dataclass(frozen=True)
class FakeProcessor:
    """See `jaxinfer.images.processor.Processor`."""

    image_token: int = IMAGE
    most_rows: int = 4096
    max_pixels: int = 4096

    @property
    def table(self) -> np.ndarray:
        return np.tile(np.arange(256, dtype=np.float32) / 255, (3, 1))

    @property
    def channels(self) -> np.ndarray:
        return np.arange(3)

    @property
    def identity(self) -> str:
        return repr(self)

    def prepare(self, picture: Image | np.ndarray, /, **options: Any) -> ImageInput:
        picture = rgb(picture)
        for name, value in options.items():
            if name != "max_pixels" or value > self.max_pixels:
                raise ImageError(f"{name} = {value!r} is not supported")
        if picture.size == (HANGS, 2):
            time.sleep(1e6)
        if picture.size == (GREEDY, 2):
            bytearray(1 << 40)
        rows, columns = picture.height // 2 * 2, picture.width // 2 * 2
        if rows * columns > options.get("max_pixels", self.max_pixels) or not rows * columns:
            raise ImageError(f"a picture of {picture.width} x {picture.height} is not supported")
        patches = np.asarray(picture)[:rows, :columns].reshape(-1, 3)
        grid = (1, rows, columns)
        return ImageInput(patches, grid, digest_of(self, patches, grid))

    def expand(self, image: ImageInput) -> list[list[int]]:
        return [[self.image_token] * (image.grid[1] * image.grid[2] // 4)]


def make(config_json: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> FakeProcessor:
    """Make the processor."""
    size = files.get("preprocessor_config.json", {}).get("max_pixels", 4096)
    return FakeProcessor(config_json.get("image_token_id", IMAGE), max_pixels=size)


def fake_source() -> ProcessorSource:
    """Return the source of the processor."""
    return ProcessorSource(FAKE, {"image_token_id": IMAGE}, {})
