"""Images as users hold them, and as text of a data URL: conversion to RGB pictures."""

from __future__ import annotations

import base64
import binascii
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxinfer.images.decode import LIMITS, ImageLimits, decode_picture
from jaxinfer.images.processor import ImageError

_DATA_URL = re.compile(r"data:(?P<kind>[\w.+-]*/?[\w.+*-]*)(?P<options>(?:;[\w.+=-]*)*),", re.IGNORECASE)
_CHANNELS = (1, 3, 4)
_WHITE = 255
_REMOTE = ("http://", "https://")


def is_data_url(text: str) -> bool:
    """Return whether a text is a data URL, of any kind."""
    return text[:5].lower() == "data:"


def data_of(url: str, limits: ImageLimits = LIMITS) -> bytes:
    """Return the bytes in a data URL.

    Raises:
        ImageError: it is not a data URL of an image in base64, or longer than ``limits``.
    """
    found = _DATA_URL.match(url[:256])
    if found is None or not found["kind"].lower().startswith("image/"):
        raise ImageError("the data URL must begin with data:image/<format>;base64,")
    if found["options"].lower().split(";")[-1] != "base64":
        raise ImageError("the data URL must be in base64")
    if (most := (len(url) - found.end()) * 3 // 4 - 2) > limits.bytes:
        raise ImageError(f"the image has at least {most} bytes, and may have {limits.bytes}")
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: it is not ASCII
        raise ImageError("the data URL has invalid base64") from error


def picture_of(source: Any, limits: ImageLimits = LIMITS) -> Image.Image:
    """Return an RGB picture of an image file (path, bytes, or data URL), a Pillow image, or an array.

    Files and URLs are decoded by `decode_picture`. As in `transformers`, a Pillow image or an array is not turned, and
    its alpha channel is composited over white.

    Raises:
        ImageError: it cannot be converted, or a file cannot be read.
    """
    match source:
        case Image.Image():
            return _converted(source)
        case bytes() | bytearray() | memoryview():
            return decode_picture(bytes(source), limits)
        case str() if is_data_url(source):
            return decode_picture(data_of(source, limits), limits)
        case str() if source.startswith(_REMOTE):
            raise ImageError("URLs are not fetched here: give the file's path or its bytes")
        case str() | os.PathLike():
            return decode_picture(_read(Path(source), limits), limits)
    if hasattr(source, "__array__"):
        return _of_array(np.asarray(source))
    kinds = "a path, bytes, a data URL, a Pillow image or an array"
    raise ImageError(f"an image must be {kinds}, not {type(source).__name__}")


def _read(path: Path, limits: ImageLimits) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limits.bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ImageError(f"the image {str(path)[:200]!r} cannot be read: {error}") from error


def _converted(picture: Image.Image) -> Image.Image:
    try:
        if "A" not in picture.getbands() and picture.info.get("transparency") is None:
            return picture.convert("RGB")
        white = Image.new("RGBA", picture.size, (_WHITE, _WHITE, _WHITE, _WHITE))
        return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # a file that was opened, and not loaded
        raise ImageError(f"the image cannot be converted to RGB: {error}") from error


def _of_array(pixels: np.ndarray) -> Image.Image:
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] not in _CHANNELS or not pixels.size:
        shape = "uint8 [height, width] or [height, width, channels] with 1, 3 or 4 channels"
        raise ImageError(f"an array of an image must be {shape}, not {pixels.dtype} {list(pixels.shape)}")
    if pixels.shape[-1] == 4:
        alpha = pixels[..., 3:] / _WHITE
        pixels = np.round(alpha * pixels[..., :3] + (1 - alpha) * _WHITE).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3))))
