"""Vision tower: from the patches of an image to rows that take the place of token embeddings."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.images.expansion import placeholders
from jaxinfer.images.processor import Processor
from jaxinfer.layers.attention import Attend, causal_attend
from jaxinfer.layers.base import Layer
from jaxinfer.layers.merged import Merged
from jaxinfer.layers.rope import AxisPositions
from jaxinfer.models.config import ConfigError, ConfigReader, shown
from jaxinfer.types import ImageInput, ParamTree, PlacedImage

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of an image."""


@runtime_checkable
class TowerConfig(Protocol):
    """Fields that the config of every tower has.

    Attributes:
        merged: patches that become one row of the output.
        values: values of a patch.
        width: numbers of an output row: hidden size * (1 + deep).
        deep: decoder layers after which further numbers of an output row are added to the hidden states (deepstack).
        bidirectional: whether the tokens of an image attend to each other in both directions.
    """

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


def vision_config(config_json: Mapping[str, Any], defaults: Mapping[str, Any]) -> ConfigReader:
    """Return the reader of the ``vision_config``."""
    found = config_json.get("vision_config")
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: vision_config = {shown(found)} must be an object")
    return ConfigReader(found, defaults)


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
        processor: makes the image processor from config.json and the JSON files of the folder that describe it
            (`jaxinfer.images.processor.PROCESSOR_FILES`), by name. A server's processes import it from its module.
        axes: rotary positions on three axes of a prompt with images; None: positions are those of text.
    """

    config: Callable[[Mapping[str, Any]], Any]
    param_specs: Callable[[Any], ParamTree]
    module: Callable[[Any], Tower]
    processor: Callable[[Mapping[str, Any], Mapping[str, Mapping[str, Any]]], Processor]
    axes: Callable[[Any], PlaceAxes] | None = None

    @property
    def maker(self) -> str:
        """The name of ``processor``, ``module:function``.

        Raises:
            ConfigError: it is no function of a module.
        """
        module, name = self.processor.__module__, self.processor.__qualname__
        if getattr(sys.modules.get(module), name, None) is not self.processor:
            raise ConfigError(f"processor = {module}:{name} of the model's family must be a function of a module")
        return f"{module}:{name}"


@dataclasses.dataclass(frozen=True)
class Vision:
    """The vision tower of a loaded model."""

    module: Tower
    config: Any
    family: VisionFamily
    processor: Processor

    @functools.cached_property
    def placeholders(self) -> tuple[int, ...]:
        """Ids of the placeholders in a prompt."""
        return placeholders(self.processor)

    def held(self, tokens: Int[np.ndarray, "*batch"]) -> Bool[np.ndarray, "*batch"]:
        """Return which tokens are placeholders."""
        return np.isin(tokens, self.placeholders)

    def place(self, tokens: Sequence[int], images: Sequence[ImageInput]) -> tuple[PlacedImage, ...]:
        """Place images at the placeholders of an expanded prompt, in order.

        Raises:
            ValueError: the prompt has more or fewer placeholders than the images have rows.
        """
        places = np.flatnonzero(self.held(np.asarray(tokens)))
        counts = [image.patches.shape[0] // self.config.merged for image in images]
        if len(places) != sum(counts):
            found = f"{len(places)} placeholders {self.placeholders}"
            raise ValueError(f"images: the prompt has {found}, and {len(images)} images have {sum(counts)} rows")
        ends = np.cumsum(counts)
        return tuple(
            PlacedImage(int(places[end - count]), int(places[end - 1]) + 1, image)
            for image, count, end in zip(images, counts, ends, strict=True)
        )

    def axes(self, tokens: Sequence[int], images: Sequence[PlacedImage]) -> Int[np.ndarray, "3 length"] | None:
        """Return the rotary positions of a prompt; None: those of text."""
        return None if self.family.axes is None else self.family.axes(self.config)(tokens, images)

    def attend(self, tokens: Int[Array, "*batch time"]) -> Attend:
        """Return the attention backend of contiguous sequences with images."""
        if not self.config.bidirectional:
            return causal_attend
        return functools.partial(causal_attend, ends=jnp.asarray(self.ends(np.asarray(tokens))))

    def ends(self, tokens: Int[np.ndarray, "*batch time"]) -> Int[np.ndarray, "*batch time"]:
        """Return the last position that each token sees: within an image, with attention in both directions, that of
        the image; else its own. Images are runs of placeholders."""
        held, at = self.held(tokens), np.arange(tokens.shape[-1])
        last = held & ~np.append(held[..., 1:], np.zeros_like(held[..., :1]), axis=-1)
        following = np.minimum.accumulate(np.where(last, at, at.size)[..., ::-1], axis=-1)[..., ::-1]
        return np.where(held, following, at).astype(np.int32)

    def merged(
        self, params: Any, tokens: Int[Array, "*batch time"], images: Sequence[ImageInput]
    ) -> tuple[Merged, Int[Array, "*batch time"] | AxisPositions]:
        """Return the input of the decoder, and its positions, of contiguous sequences with images.

        Args:
            params: those of the tower.
            images: in the order of their placeholders in ``tokens``, row after row.

        Raises:
            ValueError: see `place`.
            TypeError: ``tokens`` are traced: only pixels and parameters may be.
        """
        if isinstance(tokens, jax.core.Tracer):
            raise TypeError("tokens are traced: with images they must be concrete; pixels and parameters may be traced")
        ids = np.asarray(tokens)
        flat = self.place(ids.reshape(-1).tolist(), images)
        encoded = [self.encode(params, frame) for image in images for frame in image.frames]
        held = self.held(ids)
        rows = np.where(held, np.cumsum(held).reshape(ids.shape) - 1, -1)
        at = np.broadcast_to(np.arange(ids.shape[-1]), ids.shape)
        merged = Merged(tokens, jnp.asarray(rows), jnp.concatenate(encoded))
        if self.family.axes is None:
            return merged, jnp.asarray(at)
        place = self.family.axes(self.config)
        length, axes = ids.shape[-1], []
        for index, row in enumerate(ids.reshape(-1, length).tolist()):
            first = index * length
            own = [
                placed._replace(start=placed.start - first, stop=placed.stop - first)
                for placed in flat
                if first <= placed.start < first + length
            ]
            axes.append(place(row, own))
        return merged, AxisPositions(jnp.asarray(at), jnp.asarray(np.stack(axes, 1).reshape(3, *ids.shape)))

    def encode(self, params: Any, image: ImageInput, rows: int | None = None) -> Float[Array, "tokens width"]:
        """Return the rows of one image or frame. Pure, and differentiable with respect to patches of floating point.

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
