"""Tests of decoding image files: colours as transformers converts them, limits before decoding, and hostile files."""

from __future__ import annotations

import io
import random
import resource
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from jaxinfer.images.decode import ImageLimits, decode_picture
from jaxinfer.images.processor import ImageError
from tests.images.pictures import gif, picture, pixels, png, saved

SMALL = ImageLimits(1 << 16, 1 << 14)
ORIENTATION = 274
TURNED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(decode_picture(data))


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


@pytest.mark.parametrize("form", ["PNG", "BMP", "PPM", "WEBP", "GIF", "JPEG"])
def test_each_format(form: str) -> None:
    flat = np.full((3, 5, 3), (200, 100, 50), np.uint8)
    found = decoded(saved(Image.fromarray(flat), form, **({"lossless": True} if form == "WEBP" else {})))
    np.testing.assert_allclose(found, flat, atol=2 if form == "JPEG" else 0)


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_orientation_of_exif(orientation: int, form: str) -> None:
    own = pixels(5, 3)
    data = saved(
        Image.fromarray(own), form, exif=oriented(orientation), **({"lossless": True} if form == "WEBP" else {})
    )
    np.testing.assert_array_equal(decoded(data), TURNED[orientation](own))


def test_alpha_is_dropped() -> None:
    own = pixels(6, 4, 4)
    np.testing.assert_array_equal(decoded(saved(Image.fromarray(own))), own[..., :3])


def test_transparent_colours_of_palettes_stay_colours() -> None:
    own = Image.fromarray(np.arange(8, dtype=np.uint8).reshape(2, 4), "P")
    own.putpalette(colours := pixels(8, 1, seed=1).reshape(-1).tolist())
    expected = np.array(colours, np.uint8).reshape(2, 4, 3)
    for transparency in (3, bytes([0, 128, 255])):
        np.testing.assert_array_equal(decoded(saved(own, transparency=transparency)), expected)


def test_16_bit_grey_is_clipped() -> None:
    own = np.array([[0, 200, 255, 256, 40000, 65535]], np.uint16)
    expected = np.array([[0, 200, 255, 255, 255, 255]], np.uint8)[..., None].repeat(3, -1)
    np.testing.assert_array_equal(decoded(saved(Image.fromarray(own))), expected)


def test_grey_one_bit_and_cmyk() -> None:
    grey = pixels(4, 2, 1)[..., 0]
    np.testing.assert_array_equal(decoded(saved(Image.fromarray(grey))), grey[..., None].repeat(3, -1))
    bits = Image.fromarray((grey > 127).astype(np.uint8) * 255).convert("1")
    assert set(np.unique(decoded(saved(bits)))) <= {0, 255}
    white = Image.new("CMYK", (8, 8), (0, 0, 0, 0))
    np.testing.assert_array_equal(decoded(saved(white, "JPEG")), np.full((8, 8, 3), 255, np.uint8))


def test_the_first_frame_of_an_animation() -> None:
    first, second = Image.new("RGB", (4, 4), "red"), Image.new("RGB", (4, 4), "blue")
    for form in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if form == "WEBP" else {}
        data = saved(first, form, save_all=True, append_images=[second], **options)
        np.testing.assert_array_equal(decoded(data), np.asarray(first))


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1)])
def test_thin_pictures(size: tuple[int, int]) -> None:
    assert decode_picture(saved(picture(*size))).size == size


# ---- limits


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (saved(picture(200, 200)), "has .* bytes, and may have 65536"),
        (saved(Image.new("RGB", (129, 128))), "129 x 128 pixels"),
        (png(60000, 60000), "60000 x 60000 pixels|more pixels"),
        (png(2**31 - 1, 2**31 - 1), "pixels"),
        (gif(1, 1, (40000, 40000)), "pixels"),
        (gif(65535, 65535, (1, 1)), "pixels"),
        (b"P6 90000 90000 255\n", "pixels"),
        (b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0" + b"\xff\x3f\x00" * 2 + bytes(12), "pixels|invalid"),
        (b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 30000, 30000, 1, 24, 0, 0, 0, 0, 0, 0), "pixels"),
    ],
    ids=["bytes", "pixels", "png", "largest", "frame", "screen", "ppm", "webp", "bmp"],
)
def test_limits_hold_before_pixels_are_decoded(data: bytes, message: str) -> None:
    decode_picture(saved(picture()), SMALL)  # imports
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match=message):
            decode_picture(data, SMALL)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_bombs_need_little_memory() -> None:
    """Small files of large pictures, each decoded in a process with little memory: none of them ends it."""
    code = "from tests.images import test_decode; test_decode.explode()"
    subprocess.run([sys.executable, "-c", code], check=True)


def explode() -> None:
    """Decode the bombs, within 600 MB of address space beyond that of the imports."""
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + (600 << 20), own + (600 << 20)))
    bombs = [png(20000, 20000, 1, 0, bytes(20000 * 20000 // 8)), png(50000, 50000, 1, 3)]
    flat = Image.new("L", (12000, 12000))
    bombs += [saved(flat, form) for form in ("JPEG", "GIF")]
    for bomb in bombs:
        try:
            decode_picture(bomb, ImageLimits(pixels=10 << 20))
        except ImageError:
            continue
        raise AssertionError("a bomb was decoded")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"hello", "no image"),
        (b"\0\0\0\x18ftypisom" + bytes(64), "MP4"),
        (b"\0\0\0\x18ftypavif" + bytes(64), "AVIF"),
        (b"\x1aE\xdf\xa3" + bytes(64), "WebM"),
        (b"RIFF\0\0\0\0AVI " + bytes(64), "AVI"),
        (b"II*\0" + bytes(64), "TIFF"),
        (b"%PDF-1.7", "PDF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\0\0\1\0\1\0" + bytes(64), "no image"),
        (saved(picture(), "TIFF"), "TIFF"),
        (saved(picture(64, 64))[:-100], "truncated"),
        (saved(picture(64, 64), "JPEG")[:-200], "truncated"),
        (gif(0, 0, (0, 0)), "invalid|pixels|no image"),
        (png(0, 4), "invalid|pixels|no image"),
        (b"P6 0 0 255\n", "invalid|pixels|no image"),
    ],
)
def test_what_is_no_image_is_refused_in_one_sentence(data: bytes, message: str) -> None:
    with pytest.raises(ImageError, match=message) as refused:
        decode_picture(data)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


# ---- fuzzing


def seeds() -> list[bytes]:
    """Return files of every format and feature that is decoded."""
    own, exif = picture(33, 17), oriented(6)
    animated = {"save_all": True, "append_images": [picture(33, 17, seed=1)]}
    return [
        *(saved(own, form) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM")),
        saved(own, exif=exif),
        saved(own, "JPEG", exif=exif, progressive=True),
        saved(own, "WEBP", exif=exif, lossless=True),
        saved(own.convert("P"), transparency=3),
        saved(own.convert("RGBA"), "WEBP"),
        saved(own.convert("CMYK"), "JPEG"),
        saved(own.convert("1"), "PPM"),
        saved(Image.fromarray(pixels(9, 9, 1)[..., 0].astype(np.uint16) * 257)),
        *(saved(own, form, **animated) for form in ("GIF", "PNG", "WEBP")),
        b"P3 2 2 255\n" + b"1 2 3 " * 4,
    ]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return a file with a few changes: bytes, lengths, cuts, repeats, and the head of another format."""
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(made) or 1)
        match draw.randrange(6):
            case 0:
                made[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                made[at : at + 4] = struct.pack(">I", draw.choice((0, 1, 2**31, 2**32 - 1, draw.randrange(2**32))))
            case 2:
                del made[at:]
            case 3:
                del made[at : at + draw.randrange(1, 64)]
            case 4:
                made[at:at] = made[at : at + draw.randrange(1, 256)]
            case 5:
                at = draw.randrange(min(64, len(made)) or 1)
                made[at : at + 2] = struct.pack("<H", draw.choice((0, 1, 0xFFFF, draw.randrange(2**16))))
    return bytes(made)


def fuzz(seed: int, count: int) -> int:
    """Decode mutated files; return the number of those that were refused."""
    draw, files = random.Random(seed), seeds()
    return sum(is_refused(mutated(draw.choice(files), draw)) for _ in range(count))


def is_refused(data: bytes) -> bool:
    """Return whether a file is refused, in one sentence, rather than decoded."""
    try:
        found = decode_picture(data, SMALL)
    except ImageError as error:
        message = str(error)
    else:
        assert found.mode == "RGB"
        assert found.width * found.height <= SMALL.pixels
        return False
    assert 0 < len(message) < 300, data.hex()
    return True


def test_fuzzed_files_are_decoded_or_refused(seed: int) -> None:
    assert fuzz(seed, 600) > 100


@pytest.mark.slow
def test_many_fuzzed_files(seed: int) -> None:
    assert fuzz(seed, 10_000) > 2_000


def test_seeds_are_decoded() -> None:
    for data in seeds():
        assert decode_picture(io.BytesIO(data).getvalue(), SMALL).mode == "RGB"
