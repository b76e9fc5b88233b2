"""Tests of images as users hold them."""

from __future__ import annotations

import base64
import io
import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxinfer.images.decode import ImageLimits
from jaxinfer.images.processor import ImageError
from jaxinfer.images.source import data_of, picture_of
from tests.images.pictures import picture, pixels, saved

OWN = pixels(5, 3)
FILE = saved(Image.fromarray(OWN))
URL = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"


def found(source: Any) -> np.ndarray:
    return np.asarray(picture_of(source))


def test_one_picture_in_every_form(tmp_path: pathlib.Path) -> None:
    (path := tmp_path / "a.png").write_bytes(FILE)
    forms = (FILE, bytearray(FILE), memoryview(FILE), URL, path, str(path), Image.fromarray(OWN), OWN, Image.open(path))
    for source in forms:
        np.testing.assert_array_equal(found(source), OWN)


def test_alpha_of_pictures_and_arrays_is_composited_over_white() -> None:
    """As transformers does: alpha is dropped from files alone."""
    own = pixels(6, 4, 4)
    own[0, 0, 3], own[0, 1, 3] = 0, 255
    alpha = own[..., 3:] / 255
    expected = np.round(alpha * own[..., :3] + (1 - alpha) * 255)
    np.testing.assert_array_equal(found(own), expected.astype(np.uint8))
    np.testing.assert_allclose(found(Image.fromarray(own)), expected, atol=1)
    np.testing.assert_array_equal(found(saved(Image.fromarray(own))), own[..., :3])


def test_a_picture_is_not_turned_and_a_file_is() -> None:
    exif = Image.Exif()
    exif[274] = 6
    data = saved(picture(5, 3), exif=exif)
    assert picture_of(data).size == (3, 5)
    with Image.open(io.BytesIO(data)) as opened:
        assert picture_of(opened).size == (5, 3)


def test_grey_arrays() -> None:
    grey = pixels(4, 2, 1)
    for source in (grey, grey[..., 0]):
        np.testing.assert_array_equal(found(source), grey.repeat(3, -1))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (7, "not int"),
        (None, "not NoneType"),
        (OWN.astype(np.float32), r"float32 \[3, 5, 3\]"),
        (OWN.transpose(2, 0, 1), r"uint8 \[3, 3, 5\]"),
        (OWN[:0], r"uint8 \[0, 5, 3\]"),
        (OWN[None], r"uint8 \[1, 3, 5, 3\]"),
        ("nowhere/a.png", "cannot be read"),
        ("a\0b", "cannot be read"),
        (".", "cannot be read"),
        ("https://example.com/a.png", "not fetched"),
        (b"hello", "no image"),
    ],
)
def test_what_is_no_image_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        picture_of(source)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:", "must begin with"),
        ("data:,hello", "must begin with"),
        ("data:text/plain;base64,aGVsbG8=", "must begin with"),
        ("data:video/mp4;base64,AAAA", "must begin with"),
        (f"data:image/png{';a' * 200};base64,AAAA", "must begin with"),
        ("data:image/png,hello", "base64"),
        ("data:image/png;base64,AA=A", "invalid base64"),
        ("data:image/png;base64,A A A A", "invalid base64"),
        ("data:image/png;base64,ÄÄÄÄ", "invalid base64"),
        (f"data:image/png;base64,{'A' * 4000}", "at least 2998 bytes"),
    ],
)
def test_data_urls_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        data_of(url, ImageLimits(bytes=1000))


def test_data_urls_that_are_read() -> None:
    for head in ("data:image/png;base64,", "DATA:image/jpeg;charset=utf-8;base64,", "data:image/svg+xml;BASE64,"):
        assert data_of(head + URL.partition(",")[2]) == FILE


def test_a_file_is_read_up_to_the_limit(tmp_path: pathlib.Path) -> None:
    (path := tmp_path / "a.png").write_bytes(FILE + bytes(1 << 16))
    with pytest.raises(ImageError, match="has 1001 bytes"):
        picture_of(path, ImageLimits(bytes=1000))
