"""Files of pictures for tests, made here."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def pixels(width: int = 4, height: int = 2, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Return random pixels [height, width, channels]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def picture(width: int = 4, height: int = 2, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return a random picture of a mode."""
    return Image.fromarray(pixels(width, height, seed=seed)).convert(mode)


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Return a picture's file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(width: int, height: int, depth: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    """Return a PNG file with this header, whatever its data are."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, (b"IHDR", b"IDAT", b"IEND"), (header, zlib.compress(data), b"")))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def gif(width: int, height: int, frame: tuple[int, int]) -> bytes:
    """Return a GIF file whose frame may be larger than its screen."""
    screen = struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return b"GIF89a" + screen + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x4c\x01\x00;"
