"""Vision tower: from the patches of an image to rows that take the place of token embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.images.processor import Processor
from jaxinfer.layers.base import Layer
from jaxinfer.types import ImageInput, ParamTree, PlacedImage

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of an image."""


@runtime_checkable
class TowerConfig(Protocol):
    """Fields that the config of every tower has.

    Attributes:
        image_token: id of the placeholders in a prompt.
        merged: patches that become one row of the output.
        values: values of a patch.
        width: numbers of an output row: hidden size * (1 + deep).
        deep: decoder layers after which further numbers of an output row are added to the hidden states (deepstack).
        bidirectional: whether the tokens of an image attend to each other in both directions.
    """

    image_token: int

    @property
    def merged(self) -> int: ...

    @property
    def values(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def deep(self) -> int: ...

    @property
    def bidirectional(self) -> bool: ...


class Tower(Layer):
    """A vision tower with its projector, as a pure function of its parameters."""

    config: Any

    def layout(self, grid: Grid, rows: int) -> dict[str, np.ndarray]:
        """Return what the tower needs to know of an image in a bucket of ``rows`` patches: arrays of shapes that depend
        on ``rows`` alone."""
        raise NotImplementedError

    def __call__(self, patches: Float[Array, "rows values"], layout: Mapping[str, Array]) -> Float[Array, "out width"]:
        """Encode one image of normalised patches; rows of padding are finite, and change no others."""
        raise NotImplementedError


PlaceAxes = Callable[[Sequence[int], Sequence[PlacedImage]], Int[np.ndarray, "3 length"]]
"""Rotary positions on the three axes of a prompt's tokens."""


@dataclasses.dataclass(frozen=True)
class VisionFamily:
    """The vision part of a family: a tower, its parameters and its processor.

    Attributes:
        config: reads the whole config.json of the checkpoint.
        processor: makes the image processor from the config of the tower and the JSON files of the folder by name.
        axes: rotary positions on three axes of a prompt with images; None: positions are those of text.
    """

    config: Callable[[Mapping[str, Any]], Any]
    param_specs: Callable[[Any], ParamTree]
    module: Callable[[Any], Tower]
    processor: Callable[[Any, Mapping[str, Mapping[str, Any]]], Processor]
    axes: Callable[[Any], PlaceAxes] | None = None


@dataclasses.dataclass(frozen=True)
class Vision:
    """The vision tower of a loaded model."""

    module: Tower
    config: Any
    family: VisionFamily
    processor: Processor

    def axes(self, tokens: Sequence[int], images: Sequence[PlacedImage]) -> Int[np.ndarray, "3 length"] | None:
        """Return the rotary positions of a prompt; None: those of text."""
        return None if self.family.axes is None else self.family.axes(self.config)(tokens, images)

    def encode(self, params: Any, image: ImageInput, rows: int | None = None) -> Float[Array, "tokens width"]:
        """Return the rows of one image. Pure, and differentiable with respect to patches of floating point.

        Args:
            params: those of the tower.
            rows: patches of the program; results may depend on it in their last bits. None: those of the image.
        """
        given = image.patches.shape[0]
        rows = given if rows is None else rows
        layout = {name: jnp.asarray(value) for name, value in self.module.layout(image.grid, rows).items()}
        patches = jnp.pad(self.normalised(image.patches), ((0, rows - given), (0, 0)))
        return self.run(params, patches, layout)[: given // self.config.merged]

    def run(self, params: Any, patches: Array, layout: Mapping[str, Array]) -> Float[Array, "out width"]:
        """Return all rows of a program, of padding too."""
        apply: Any = self.module.apply
        return apply({"params": params}, patches, layout)

    def normalised(self, patches: Any) -> Float[Array, "rows values"]:
        """Return normalised values: of resized pixels by a table, so that host and device have the same bits."""
        if jnp.issubdtype(patches.dtype, jnp.floating):
            return jnp.asarray(patches)
        table, channels = self.processor.table, self.processor.channels
        return jnp.asarray(table)[jnp.asarray(channels), jnp.asarray(patches, jnp.int32)]
