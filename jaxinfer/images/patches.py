"""Base of image processors that cut one resized picture into square patches."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from jaxinfer.images.pixels import COLOURS, image_settings, require, require_kind, rgb
from jaxinfer.images.processor import ImageError, digest_of
from jaxinfer.types import ImageInput

MOST_PIXELS = 1 << 25
"""The most pixels of a resized picture: a very narrow one, whose short side is enlarged, would have more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchProcessor(abc.ABC):
    """See `jaxinfer.images.processor.Processor`.

    Attributes:
        patch, merge: pixels of a patch's side, and patches of a token's side, whose rows are consecutive.
        resample: Pillow's filter.
        values: normalised value of each pixel value in each channel.
    """

    image_token: int = dataclasses.field(repr=False)
    patch: int
    merge: int = 1
    resample: int
    values: tuple[tuple[float, ...], ...] = dataclasses.field(repr=False)

    @functools.cached_property
    def table(self) -> np.ndarray:
        return np.asarray(self.values, np.float32)

    @property
    def channels(self) -> np.ndarray:
        return np.repeat(np.arange(COLOURS), self.patch**2)

    @functools.cached_property
    def identity(self) -> str:
        return f"{self!r} {self.values!r}"

    @property
    @abc.abstractmethod
    def most_rows(self) -> int: ...

    @abc.abstractmethod
    def expand(self, image: ImageInput) -> list[list[int]]:
        """See `jaxinfer.images.processor.Processor`."""

    def prepare(self, picture: Image.Image | np.ndarray, /, **options: Any) -> ImageInput:
        """Resize a picture and cut it into patches; raises ImageError, see `jaxinfer.images.processor.Processor`."""
        pixels = self.pixels(rgb(picture), **options)
        grid = (1, pixels.shape[0] // self.patch, pixels.shape[1] // self.patch)
        patches = cut(pixels, self.patch, self.merge)
        return ImageInput(patches, grid, digest_of(self, patches, grid))

    @abc.abstractmethod
    def pixels(self, picture: Image.Image, /, **options: Any) -> np.ndarray:
        """Return the pixels of a resized picture, [height, width, 3]."""

    def resized(self, picture: Image.Image, height: int, width: int) -> np.ndarray:
        """Resize a picture.

        Raises:
            ImageError: the result would have no pixels, or more than `MOST_PIXELS`.
        """
        if not 0 < height * width <= MOST_PIXELS:
            raise ImageError(f"a picture of {picture.width} x {picture.height} pixels is too narrow")
        return np.asarray(picture.resize((width, height), Image.Resampling(self.resample)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareProcessor(PatchProcessor):
    """A processor whose resized pictures are squares of ``side`` pixels: bounds on their pixels change nothing."""

    side: int

    def __post_init__(self) -> None:
        if not self.merge or self.side % (self.patch * self.merge):
            units = f"{self.merge} x {self.merge} patches of {self.patch} pixels"
            raise ValueError(f"config.json: vision_config.image_size = {self.side} must be a multiple of {units}")

    @property
    def most_rows(self) -> int:
        return int((self.side // self.patch) ** 2)

    def expand(self, image: ImageInput) -> list[list[int]]:
        del image
        return [self.of_square()]

    def of_square(self) -> list[int]:
        """Return the tokens of a square."""
        return [self.image_token] * (self.most_rows // self.merge**2)

    def pixels(self, picture: Image.Image, /, **options: Any) -> np.ndarray:
        pixel_bounds(options, ("min_pixels", "max_pixels"))
        return self.square(picture)

    def square(self, picture: Image.Image) -> np.ndarray:
        """Return the pixels of a picture, resized to [side, side, 3]."""
        return self.resized(picture, self.side, self.side)


def pixel_bounds(options: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, int]:
    """Return the bounds on pixels among the options of a request.

    Raises:
        ImageError: an option is unknown, or no positive integer.
    """
    for name, value in options.items():
        if name not in known:
            raise ImageError(f"option {name} is unknown (known: {', '.join(known)})")
        if type(value) is not int or value < 1:
            raise ImageError(f"{name} = {value!r} must be a positive integer")
    return dict(options)


def cut(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Cut pixels [height, width, 3] into patches [rows, values], by token, patch of a token, channel and pixel."""
    height, width, colours = pixels.shape
    unit = patch * merge
    parts = pixels.reshape(height // unit, merge, patch, width // unit, merge, patch, colours)
    return np.ascontiguousarray(parts.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, colours * patch**2))


def patch_settings(
    files: Mapping[str, Mapping[str, Any]], kinds: tuple[str, ...], resample: Image.Resampling
) -> tuple[Mapping[str, Any], int]:
    """Return the settings of a processor and its filter.

    Args:
        kinds: classes of transformers with these semantics.
        resample: the default of the filter.

    Raises:
        ValueError: the processor is of another class, does not resize, or its filter is unknown.
    """
    settings = image_settings(files)
    require_kind(settings, kinds)
    require(settings.get("do_resize") is not False, settings, "do_resize", "is not supported")
    found = settings.get("resample")
    known = found is None or (type(found) is int and found in set(Image.Resampling))
    require(known, settings, "resample", "is unknown")
    return settings, int(resample if found is None else found)


def sides(settings: Mapping[str, Any], name: str, default: Mapping[str, int], single: str = "") -> dict[str, int]:
    """Read a size: an object of positive integers.

    Args:
        single: what a size that is one number means; none: height and width.

    Raises:
        ValueError: it is no such object.
    """
    found = default if settings.get(name) is None else settings[name]
    if type(found) is int:
        found = {single: found} if single else {"height": found, "width": found}
    good = isinstance(found, Mapping) and found
    positive = good and all(type(side) is int and 0 < side < 1 << 16 for side in found.values() if side is not None)
    require(bool(positive), settings, name, "must be an object of positive integers")
    return {edge: side for edge, side in found.items() if side is not None}


def tower_sizes(config_json: Mapping[str, Any], names: Mapping[str, int]) -> tuple[int, ...]:
    """Return positive integers of ``vision_config``, by name and default.

    Raises:
        ValueError: one is no positive integer.
    """
    found = config_json.get("vision_config")
    vision = found if isinstance(found, Mapping) else {}
    return tuple(positive(vision, name, default, f"vision_config.{name}") for name, default in names.items())


def token_id(config_json: Mapping[str, Any], name: str, default: int) -> int:
    """Return the token id that config.json has as ``<name>_index`` or ``<name>_id``; raises as `positive`."""
    return positive(config_json, f"{name}_id" if f"{name}_id" in config_json else f"{name}_index", default)


def positive(config: Mapping[str, Any], name: str, default: int, path: str = "") -> int:
    """Read a positive integer of config.json; absent or null: ``default``.

    Args:
        path: its name in messages.

    Raises:
        ValueError: it is none.
    """
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"config.json: {path or name} = {value!r} must be > 0")
    return value
