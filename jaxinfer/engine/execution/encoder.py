"""Vision encoder of an engine: what shapes it, the inputs of its programs, and the program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int32, UInt8

from jaxinfer.config import ResolvedEngine
from jaxinfer.config.images import ImageNeeds
from jaxinfer.engine.execution.commands import Encode
from jaxinfer.engine.scheduling import encoder_cache
from jaxinfer.images.processor import smallest_image
from jaxinfer.models.model import Model
from jaxinfer.models.vision.tower import Grid, Vision
from jaxinfer.types import VISION, ImageInput


def image_needs(model: Model) -> ImageNeeds | None:
    """Return what the vision tower of a model asks of an engine; None: there is none."""
    if model.vision is None:
        return None
    vision, config = model.vision, model.vision.config
    return ImageNeeds(
        tokens=vision.placeholders,
        merged=config.merged,
        values=config.values,
        least_rows=smallest(vision).patches.shape[0],
        most_rows=vision.processor.most_rows,
        axes=vision.family.axes is not None,
        both_ways=config.bidirectional,
    )


@functools.lru_cache
def smallest(vision: Vision) -> ImageInput:
    """Return an image with as few patches as the processor makes."""
    return smallest_image(vision.processor)


def text_part(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters, or their specs, without those of a vision tower."""
    return {name: node for name, node in tree.items() if name != VISION}


def encode_command(vision: Vision, engine: ResolvedEngine, planned: encoder_cache.Encode) -> Encode:
    """Return the command for an image, in the smallest program that holds it."""
    image, taken = planned
    count = image.patches.shape[0]
    size = next(size for size in engine.encoder_sizes if size >= count)
    patches = np.zeros((size, image.patches.shape[1]), np.uint8)
    patches[:count] = image.patches
    rows = np.full(size // vision.config.merged, engine.encoder_cache_size, np.int32)
    rows[: len(taken)] = taken
    layout = {name: np.asarray(value) for name, value in vision.module.layout(image.grid, size).items()}
    return Encode(patches, layout, rows)


def abstract_layout(vision: Vision, size: int) -> dict[str, np.ndarray]:
    """Return a layout for the program of ``size`` patch rows, of which the shapes and dtypes count."""
    grid: Grid = smallest(vision).grid
    return vision.module.layout(grid, size)


def make_encode(vision: Vision) -> Callable[..., Array]:
    """Make the program that encodes one image into rows of the encoder cache, which is donated. Rows beyond it are
    dropped: those of padding."""

    def encode(
        params: Any,
        cache: Float[Array, "cached width"],
        patches: UInt8[Array, "rows values"],
        layout: Mapping[str, Array],
        rows: Int32[Array, " outputs"],
    ) -> Float[Array, "cached width"]:
        found = vision.run(params, vision.normalised(patches), layout)
        return cache.at[rows].set(found.astype(cache.dtype), mode="drop")

    return encode


def abstract_cache(model: Model, engine: ResolvedEngine, sharding: jax.sharding.Sharding) -> Any:
    """Return the encoder cache as `jax.ShapeDtypeStruct`; None where the engine serves no images, or another stage has
    it."""
    if model.vision is None or engine.images is None:
        return None
    shape = (engine.encoder_cache_size, model.vision.config.width)
    return jax.ShapeDtypeStruct(shape, model.dtype, sharding=sharding)
