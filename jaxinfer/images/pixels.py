"""Settings and steps common to image processors: colours, normalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from jaxinfer.images.processor import ImageError

COLOURS = 3
_FILE = "preprocessor_config.json"
_SAVED = "processor_config.json"


def image_settings(files: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the settings of the image processor from the JSON files of a checkpoint, as transformers selects them;
    empty if no file has any."""
    inner = files.get(_SAVED, {}).get("image_processor")
    return inner if isinstance(inner, Mapping) else files.get(_FILE, {})


def require(condition: bool, settings: Mapping[str, Any], name: str, what: str) -> None:
    """Raise a ValueError that names a setting and its value, unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"{_FILE}: {name} = {settings.get(name)!r} {what}")


def whole(settings: Mapping[str, Any], name: str, default: int) -> int:
    """Read a positive integer; absent or null: ``default``."""
    value = default if settings.get(name) is None else settings[name]
    require(type(value) is int and 0 < value < 2**31, settings, name, "must be a positive integer")
    return int(value)


def value_table(
    settings: Mapping[str, Any], mean: tuple[float, ...], deviation: tuple[float, ...]
) -> tuple[tuple[float, ...], ...]:
    """Return the normalised value of each pixel value in each channel, as transformers rounds it: scaled in float64,
    then normalised in float32.

    Args:
        mean, deviation: those of the family, where the settings have none.
    """
    values = np.arange(256, dtype=np.float64)
    if settings.get("do_rescale") is not False:
        values = values * _number(settings, "rescale_factor", 1 / 255)
    table = np.broadcast_to(values.astype(np.float32), (COLOURS, 256))
    if settings.get("do_normalize") is not False:
        of_channel = [
            np.asarray(channel_numbers(settings, name, default), np.float32)[:, None]
            for name, default in (("image_mean", mean), ("image_std", deviation))
        ]
        require(bool(np.all(of_channel[1] != 0)), settings, "image_std", "must not be 0")
        table = (table - of_channel[0]) / of_channel[1]
    return tuple(tuple(row) for row in table.tolist())


def require_kind(settings: Mapping[str, Any], kinds: tuple[str, ...]) -> None:
    """Check that the processor is one of these classes of transformers, or their variant for tensors or Pillow.

    Raises:
        ValueError: it is of another class.
    """
    kind = settings.get("image_processor_type", kinds[0])
    plain = kind.removesuffix("Fast").removesuffix("Pil") if isinstance(kind, str) else kind
    require(plain in kinds, settings, "image_processor_type", f"is not supported (known: {', '.join(kinds)})")


def rgb(picture: Image.Image | np.ndarray) -> Image.Image:
    """Return a picture in RGB: transparent parts become white, as transformers' PIL processors compose them.

    Raises:
        ImageError: an array is not [height, width, 3] of uint8.
    """
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != COLOURS or not picture.size:
            raise ImageError(f"an array must be [height, width, 3] of uint8, not {picture.shape} of {picture.dtype}")
        return Image.fromarray(picture)
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
    return picture.convert("RGB")


def _number(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = default if settings.get(name) is None else settings[name]
    require(isinstance(value, int | float) and math.isfinite(value), settings, name, "must be a finite number")
    return float(value)


def channel_numbers(settings: Mapping[str, Any], name: str, default: tuple[float, ...]) -> list[float]:
    """Read a number for each channel, or one for all; absent or null: ``default``."""
    value = settings.get(name)
    if value is None:
        return list(default)
    value = value if isinstance(value, list) else [value] * COLOURS
    good = len(value) == COLOURS and all(type(each) in (int, float) and math.isfinite(each) for each in value)
    require(good, settings, name, "must be a number, or one for each colour")
    return [float(each) for each in value]
