"""Pictures for tests of image processors: files of many kinds, and pictures in memory. Needs numpy and Pillow."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

ORIENTATION = 0x0112
"""EXIF tag of the orientation."""


def pixels(height: int, width: int, seed: int, channels: int = 3) -> np.ndarray:
    """Return a picture [height, width, channels] of uint8: waves, with noise on top."""
    draw = np.random.Generator(np.random.PCG64(seed))
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    waves = [
        128 + 90 * np.sin(rows / draw.uniform(2, 9) + columns / draw.uniform(2, 9) + draw.uniform(0, 6))
        for _ in range(channels)
    ]
    noise = draw.integers(-30, 31, (height, width, channels))
    return np.clip(np.stack(waves, axis=-1) + noise, 0, 255).astype(np.uint8)


def picture(height: int, width: int, seed: int) -> Image.Image:
    """Return an RGB picture."""
    return Image.fromarray(pixels(height, width, seed))


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _plain(height: int, width: int, kind: str) -> bytes:
    return _encoded(picture(height, width, height * width), kind)


def _turned(orientation: int, kind: str) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return _encoded(picture(45, 61, orientation), kind, exif=exif)


def _grey16(seed: int) -> Image.Image:
    values = pixels(40, 50, seed, 1)[..., 0].astype(np.uint16) * np.uint16(257)
    values[:20] //= 200  # small values are not clipped
    return Image.fromarray(values)


def _translucent(seed: int, height: int = 50, width: int = 40) -> Image.Image:
    return Image.fromarray(pixels(height, width, seed, 4))


def _palette(seed: int) -> Image.Image:
    return picture(48, 64, seed).quantize(17)


def _sized(height: int, width: int, seed: int, kind: str) -> bytes:
    return _encoded(picture(height, width, seed), kind)


_SIDES = ((1, 1), (1, 64), (64, 1), (1, 200), (200, 1), (3, 5), (14, 14), (28, 28), (70, 42), (42, 126), (300, 10))
_LARGE = ((480, 640), (1080, 1440))

FILES: dict[str, Callable[[], bytes]] = {
    **{
        f"{height}x{width}.png": functools.partial(_sized, height, width, height * width, "PNG")
        for height, width in _SIDES
    },
    **{f"{height}x{width}.jpg": functools.partial(_sized, height, width, height, "JPEG") for height, width in _LARGE},
    **{f"turned{at}.jpg": functools.partial(_turned, at, "JPEG") for at in range(2, 9)},
    "turned6.png": lambda: _turned(6, "PNG"),
    "turned9.jpg": lambda: _turned(9, "JPEG"),
    "grey.png": lambda: _encoded(picture(40, 60, 1).convert("L"), "PNG"),
    "grey.jpg": lambda: _encoded(picture(40, 60, 2).convert("L"), "JPEG"),
    "grey16.png": lambda: _encoded(_grey16(3), "PNG"),
    "bilevel.png": lambda: _encoded(picture(41, 33, 4).convert("1"), "PNG"),
    "palette.png": lambda: _encoded(_palette(5), "PNG"),
    "palette-transparent.png": lambda: _encoded(_palette(6), "PNG", transparency=3),
    "palette.gif": lambda: _encoded(_palette(7), "GIF", transparency=2),
    "alpha.png": lambda: _encoded(_translucent(8), "PNG"),
    "grey-alpha.png": lambda: _encoded(_translucent(9).convert("LA"), "PNG"),
    "rgb-transparent.png": lambda: _encoded(picture(30, 40, 10), "PNG", transparency=(1, 2, 3)),
    "alpha.webp": lambda: _encoded(_translucent(11), "WEBP", lossless=True),
    "lossy.webp": lambda: _encoded(picture(60, 80, 12), "WEBP"),
    "cmyk.jpg": lambda: _encoded(picture(56, 40, 13).convert("CMYK"), "JPEG"),
    "plain.bmp": lambda: _encoded(picture(33, 47, 14), "BMP"),
    "plain.ppm": lambda: _encoded(picture(47, 33, 15), "PPM"),
}
"""Files by name."""

HANDED: dict[str, Callable[[], Image.Image]] = {
    "RGB": lambda: picture(40, 60, 20),
    "RGBA": lambda: _translucent(21),
    "LA": lambda: _translucent(22).convert("LA"),
    "PA": lambda: _translucent(23).convert("PA"),
    "L": lambda: picture(40, 60, 24).convert("L"),
    "1": lambda: picture(40, 60, 25).convert("1"),
    "P": lambda: _palette(26),
    "I;16": lambda: _grey16(27),
    "CMYK": lambda: picture(40, 60, 28).convert("CMYK"),
    "YCbCr": lambda: picture(40, 60, 29).convert("YCbCr"),
    "transparent colour": lambda: Image.open(io.BytesIO(FILES["rgb-transparent.png"]())),
    "transparent palette": lambda: Image.open(io.BytesIO(FILES["palette-transparent.png"]())),
}
"""Pictures in memory, as a caller hands them over, by mode."""
