"""Decoding of image files to RGB pictures, within limits that are checked before any pixel is decoded."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from jaxinfer.images.processor import ImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM")
"""Formats that are decoded. TIFF is left out: its decoders have been attacked most, and no API lists it."""

MOST_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 0)
"""Pixels above which Pillow opens no image, whatever the limits."""

# Errors of Pillow's decoders: they parse hostile files in Python, where a wrong offset raises almost anything.
_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
# First bytes of files that are no images, after a number of bytes, and their names.
_OTHERS = (
    (4, b"ftypavif", "an AVIF image"),
    (4, b"ftypheic", "a HEIC image"),
    (4, b"ftyp", "a video container (MP4)"),
    (0, b"\x1aE\xdf\xa3", "a video container (WebM or Matroska)"),
    (8, b"AVI ", "a video container (AVI)"),
    (0, b"II*\0", "a TIFF image"),
    (0, b"MM\0*", "a TIFF image"),
    (0, b"%PDF", "a PDF file"),
    (0, b"<svg", "an SVG image"),
    (0, b"<?xml", "an XML file"),
)


class ImageLimits(NamedTuple):
    """Limits of one image: bytes of the file, and pixels as its header tells them."""

    bytes: int = 10 << 20
    pixels: int = 1 << 26


LIMITS = ImageLimits()


def decode_picture(data: bytes, limits: ImageLimits = LIMITS) -> Image.Image:
    """Return the first frame of an image file as an RGB picture, turned as its EXIF orientation says.

    Colours are converted as `transformers` converts those of a file: alpha and transparency are dropped, 16-bit grey is
    clipped.

    Raises:
        ImageError: the file is larger than ``limits``, of another format, truncated or invalid.
    """
    if len(data) > limits.bytes:
        raise ImageError(f"the image has {len(data)} bytes, and may have {limits.bytes}")
    with warnings.catch_warnings():  # Pillow's: metadata that is wrong, transparency that is dropped
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                _check_size(picture, limits)
                picture.load()
                _check_size(picture, limits)  # a frame may be larger than its header says
                ImageOps.exif_transpose(picture, in_place=True)
                return picture if picture.mode == "RGB" else picture.convert("RGB")  # without a copy of the pixels
        except ImageError:
            raise
        except _FAULTS as error:
            raise _refusal(data, error) from error


def _check_size(picture: Image.Image, limits: ImageLimits) -> None:
    width, height = picture.size
    if width < 1 or height < 1:
        raise ImageError(f"the image has {width} x {height} pixels")
    if width * height > limits.pixels:
        raise ImageError(f"the image has {width} x {height} pixels, and may have {limits.pixels}")


def _refusal(data: bytes, error: BaseException) -> ImageError:
    if not data:
        return ImageError("the image is empty")
    if isinstance(error, UnidentifiedImageError):
        known = next((name for at, mark, name in _OTHERS if data[at:].startswith(mark)), "no image that can be read")
        return ImageError(f"the file is {known}: images are {', '.join(FORMATS)}")
    if isinstance(error, Image.DecompressionBombError):
        return ImageError("the image has more pixels than any that is decoded")
    said = " ".join(str(error).split())[:100]
    return ImageError(f"the image is truncated or invalid: {said or type(error).__name__}")
