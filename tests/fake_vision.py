"""A tiny model with a vision tower, with random parameters, and images for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from PIL.Image import Image

from jaxinfer.images.pixels import rgb
from jaxinfer.images.processor import digest_of
from jaxinfer.models.model import Model, abstract, with_vision
from jaxinfer.models.vision.tower import Grid, PlaceAxes, Tower, Vision, VisionFamily
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import ImageInput, ParamSpec, ParamTree, PlacedImage, Request
from jaxinfer.weights import init_params
from tests.fakes import llama_json

IMAGE, VALUES, SIDE = 96, 3, 8
"""Image token, values of a patch, and most patches of a side."""


@dataclasses.dataclass(frozen=True)
class FakeTowerConfig:
    d: int
    merged: int = 4
    values: int = VALUES
    deep: int = 0
    bidirectional: bool = False

    @property
    def width(self) -> int:
        return self.d * (1 + self.deep)


class FakeTower(Tower):
    """Four patches become a token by one matrix, which also sees the mean of the image and the token's place."""

    config: FakeTowerConfig

    def layout(self, grid: Grid, rows: int) -> dict[str, np.ndarray]:
        count = int(np.prod(grid))
        seen = np.arange(rows) < count
        return {"seen": seen, "count": np.int32(count), "place": np.arange(rows // 4, dtype=np.int32) % grid[2]}

    def __call__(self, patches: Float[Array, "rows values"], layout: Mapping[str, Array]) -> Float[Array, "out width"]:
        seen = jnp.where(layout["seen"][:, None], patches, 0)
        mean = seen.sum(0) / layout["count"]
        x = jnp.concatenate([(seen + mean).reshape(-1, 4 * VALUES), jnp.sin(layout["place"])[:, None]], axis=1)
        weight = self.weight("projection")
        return x.astype(weight.dtype) @ weight


def _specs(cfg: FakeTowerConfig) -> ParamTree:
    return {"projection": ParamSpec((4 * VALUES + 1, cfg.width), (None, None), scale=0.2)}


@dataclasses.dataclass(frozen=True)
class FakeProcessor:
    """Patches of one pixel; the smallest image is a square of four."""

    image_token: int = IMAGE
    most_rows: int = SIDE * SIDE

    @property
    def table(self) -> np.ndarray:
        return np.repeat((np.arange(256, dtype=np.float32) / 127.5 - 1)[None], 3, axis=0)

    @property
    def channels(self) -> np.ndarray:
        return np.arange(VALUES)

    @property
    def identity(self) -> str:
        return "fake"

    def prepare(self, picture: Image | np.ndarray, /, **options: Any) -> ImageInput:
        del options
        picture = rgb(picture)
        width, height = (2 * max(1, min(side, SIDE) // 2) for side in picture.size)
        pixels = np.asarray(picture.resize((width, height)), np.uint8)
        patches = pixels.reshape(height // 2, 2, width // 2, 2, 3).swapaxes(1, 2).reshape(-1, VALUES)
        return image_of(np.ascontiguousarray(patches), (1, height, width))

    def expand(self, image: ImageInput) -> list[list[int]]:
        return [[IMAGE] * (int(np.prod(image.grid)) // 4)]


PROCESSOR = FakeProcessor()


def image_of(patches: np.ndarray, grid: Grid) -> ImageInput:
    return ImageInput(patches, grid, digest_of(PROCESSOR, patches, grid))


def make_image(number: int, height: int = 4, width: int = 6, frames: int = 1) -> ImageInput:
    """Return a random image or video of patches, which ``number`` determines."""
    patches = np.random.default_rng(number).integers(0, 256, (frames * height * width, VALUES), np.uint8)
    return image_of(patches, (frames, height, width))


def place_axes(tokens: Sequence[int], images: Sequence[PlacedImage]) -> Int[np.ndarray, "3 length"]:
    """Place tokens as Qwen2-VL does: an image takes one time, and goes on after its longer side."""
    parts, at, after = list[np.ndarray](), 0, 0
    for start, stop, image in images:
        parts.append(np.broadcast_to(np.arange(at, at + start - after), (3, start - after)))
        at += start - after
        frames, rows, columns = image.grid[0], image.grid[1] // 2, image.grid[2] // 2
        grid = np.indices((frames, rows, columns)).reshape(3, -1) + at
        parts.append(grid)
        at, after = at + max(rows, columns), stop
    rest = len(tokens) - after
    return np.concatenate([*parts, np.broadcast_to(np.arange(at, at + rest), (3, rest))], axis=1).astype(np.int32)


def vision_model(
    *, axes: bool = False, deep: int = 0, bidirectional: bool = False, seed: int = 0, gain: float = 6.0, **changes: Any
) -> Model:
    """Return a Llama with a tower, and random weights.

    Args:
        axes: with M-RoPE.
        deep: see `TowerConfig`.
    """
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
    text = abstract(llama_json(**(rope if axes else {}), **changes), "float32", "seeing")
    config = FakeTowerConfig(text.config.hidden_size, deep=deep, bidirectional=bidirectional)
    place: Callable[[Any], PlaceAxes] | None = _place if axes else None
    family = VisionFamily(lambda _: config, _specs, FakeTower, lambda *_: PROCESSOR, place)
    model = with_vision(text, Vision(FakeTower(config), config, family, PROCESSOR), "float32")
    params = init_params(model.specs, seed, "float32")
    return model.replace(params=jax.tree.map(lambda x: x * gain if x.ndim > 1 else x, params))


def _place(config: FakeTowerConfig) -> PlaceAxes:
    del config
    return place_axes


def make_prompt(parts: Sequence[Sequence[int] | ImageInput]) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    """Join tokens and images to an expanded prompt with its images in their places."""
    tokens, placed = list[int](), list[PlacedImage]()
    for part in parts:
        start = len(tokens)
        tokens += PROCESSOR.expand(part)[0] if isinstance(part, ImageInput) else part
        if isinstance(part, ImageInput):
            placed.append(PlacedImage(start, len(tokens), part))
    return tuple(tokens), tuple(placed)


def make_image_request(name: str, parts: Sequence[Sequence[int] | ImageInput], most: int = 6, **params: Any) -> Request:
    tokens, placed = make_prompt(parts)
    return Request(name, tokens, SamplingParams(**{"seed": 0, "max_tokens": most, **params}), images=placed)


@functools.cache
def text(number: int, count: int) -> tuple[int, ...]:
    """Return ``count`` random tokens of text."""
    return tuple(np.random.default_rng(number).integers(0, IMAGE, count).tolist())
