"""Comparison of image processors with the golden files of `tools.oracle.images_towers`."""

import dataclasses
import functools
import hashlib
import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from jaxinfer.images.expansion import expanded
from jaxinfer.images.idefics3 import TileProcessor
from jaxinfer.images.patches import PatchProcessor
from jaxinfer.images.processor import ImageError, normalised
from jaxinfer.types import ImageInput
from tests.models.vision.towers import by_row
from tools.oracle.pictures import FILES, HANDED

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "images"


@functools.cache
def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDENS / name).read_text())
    return found


def cases_of(kind: str) -> list[dict[str, Any]]:
    """Return settings, and digests of the pixels of all pictures, for each processor of a family."""
    return [case for case in _read("pictures_towers.json").values() if case["kind"] == kind]


def opened(name: str) -> Image.Image:
    """Return a picture of a file, as transformers opens it, or one in memory."""
    if name not in FILES:
        return HANDED[name.removeprefix("handed ")]()
    return ImageOps.exif_transpose(Image.open(io.BytesIO(FILES[name]()))).convert("RGB")


def faults(process: PatchProcessor, case: dict[str, Any]) -> list[str]:
    """Return the pictures whose pixels differ from transformers in a bit, or that only one of the two refuses."""
    return [name for name, wanted in case["pictures"].items() if _digest(process, opened(name)) != wanted]


def _digest(process: PatchProcessor, picture: Image.Image) -> list[Any] | None:
    try:
        image = process.prepare(picture)
    except ImageError:
        return None
    pixels = by_row(normalised(process, image.patches), image.grid, process.merge)
    assert len(image.frames[0].patches) <= process.most_rows
    return [_shape(process, image), hashlib.sha256(pixels.tobytes()).hexdigest()]


def _shape(process: PatchProcessor, image: ImageInput) -> list[int]:
    """Return rows and columns of tiles, or else height and width."""
    if isinstance(process, TileProcessor):
        return list(image.tiles or (0, 0))
    return [side * process.patch for side in image.grid[1:]]


def prompt_faults(kind: str, process: PatchProcessor) -> list[list[int]]:
    """Return the prompts that transformers expands differently."""

    def differs(row: dict[str, Any]) -> bool:
        images = [_sized(process, *size) for size in row["sizes"]]
        return expanded(process, row["prompt"], images)[0] != row["expanded"]

    return [row["prompt"] for row in _read("expansions.json")[kind] if differs(row)]


def _sized(process: PatchProcessor, height: int, width: int) -> ImageInput:
    """Return an image of a size: of pixels, or of tiles where there are any."""
    if isinstance(process, TileProcessor):
        return dataclasses.replace(shaped((height * width + 1, 1, 1)), tiles=(height, width) if height else None)
    return shaped((1, height // process.patch, width // process.patch))


def shaped(grid: tuple[int, int, int], video: bool = False) -> ImageInput:
    """Return an image of a grid, without pixels."""
    return ImageInput(np.zeros((0, 0), np.uint8), grid, video=video)


def id_of() -> Callable[[str], int | None]:
    """Return the look-up of tokens of the vocabulary in which the prompts of `prompt_faults` are."""
    vocabulary: dict[str, int] = _read("expansions.json")["vocabulary"]
    return vocabulary.get


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
