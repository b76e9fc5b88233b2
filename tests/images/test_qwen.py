"""Qwen's image processor: pixels bit-equal to those of transformers' PIL processor, sizes, videos and settings."""

import hashlib
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from jaxinfer.images.decode import decode_picture
from jaxinfer.images.processor import ImageError, normalised
from jaxinfer.images.qwen import MOST_ASPECT, MOST_FRAMES, QwenProcessor, fitted, make
from tests.images.towers import shaped
from tools.oracle.pictures import FILES, HANDED, picture, pixels

DIGESTS = json.loads((pathlib.Path(__file__).resolve().parents[1] / "goldens/images/pictures.json").read_text())
IMAGE, VIDEO = 9, 8


NAMES = {"2": "Qwen2VLForConditionalGeneration", "2.5": "Qwen2_5_VLForConditionalGeneration"}
QWEN3 = "Qwen3VLForConditionalGeneration"


def processor(architecture: str = NAMES["2"], **settings: Any) -> QwenProcessor:
    files = {"preprocessor_config.json": settings, "video_preprocessor_config.json": settings}
    return make({"architectures": [architecture], "image_token_id": IMAGE, "video_token_id": VIDEO}, files)


def bounded(least: int, most: int, architecture: str = NAMES["2"]) -> QwenProcessor:
    return processor(architecture, size={"shortest_edge": least, "longest_edge": most})


def shown(name: str) -> Image.Image:
    """Return a picture as transformers loads it: turned, and converted to RGB, if it is a file."""
    if name.startswith("handed "):
        return HANDED[name.removeprefix("handed ")]()
    return decode_picture(FILES[name]())


@pytest.mark.parametrize("settings", DIGESTS)
@pytest.mark.parametrize("name", next(iter(DIGESTS.values())))
def test_pixels_are_those_of_transformers(settings: str, name: str) -> None:
    patch, least, most = map(int, settings.split())
    process = bounded(least, most, QWEN3 if patch == 16 else NAMES["2"])
    grid, digest = DIGESTS[settings][name]
    image = process.prepare(shown(name))
    assert list(image.grid) == grid
    assert hashlib.sha256(normalised(process, image.patches).tobytes()).hexdigest() == digest


def test_an_array_is_a_picture() -> None:
    process, values = processor(), pixels(60, 90, 1)
    assert process.prepare(values) == process.prepare(Image.fromarray(values))


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 4), (0, 4, 3)])
def test_another_array_is_none(shape: tuple[int, ...]) -> None:
    with pytest.raises(ImageError, match="uint8"):
        processor().prepare(np.zeros(shape, np.uint8))


@given(
    height=st.integers(1, 3000),
    aspect=st.floats(1 / MOST_ASPECT, MOST_ASPECT),
    least=st.integers(1, 60),
    more=st.integers(0, 1500),
)
def test_no_picture_has_more_rows_than_the_most(height: int, aspect: float, least: int, more: int) -> None:
    process, width = bounded(least * 28**2, (least + more) * 28**2), max(round(height * aspect), 1)
    if max(height, width) / min(height, width) > MOST_ASPECT:
        return
    tall, wide = fitted(height, width, 28, process.pixels)
    assert tall % 28 == wide % 28 == 0
    assert tall * wide // 14**2 <= process.most_rows


def test_sides_are_rounded_half_to_even() -> None:
    assert fitted(70, 42, 28, (1, 10**6)) == (56, 56)  # 2.5 and 1.5 tokens


def test_a_narrow_picture_is_refused() -> None:
    with pytest.raises(ImageError, match="1 x 201"):
        processor().prepare(picture(201, 1, 0))


def test_a_request_may_ask_for_fewer_pixels() -> None:
    process, large = bounded(3136, 100_000), picture(280, 280, 0)
    assert process.prepare(large).grid == (1, 20, 20)
    assert process.prepare(large, max_pixels=20_000).grid == (1, 10, 10)
    assert process.prepare(picture(28, 28, 0), min_pixels=50_000).grid == (1, 16, 16)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_pixels": 100_001}, "max_pixels = 100001"),
        ({"min_pixels": 0}, "min_pixels = 0"),
        ({"max_pixels": True}, "max_pixels = True"),
        ({"size": 3}, "size"),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ImageError, match=named):
        bounded(3136, 100_000).prepare(picture(28, 28, 0), **options)


def test_an_image_is_its_tokens_in_a_prompt() -> None:
    process = processor()
    image = process.prepare(picture(56, 84, 0))
    assert process.expand(image) == [[IMAGE] * 6]


def test_digests_tell_pixels_and_settings_apart() -> None:
    first, values = processor(), pixels(56, 56, 0)
    other = values.copy()
    other[-1, -1, -1] ^= 1
    settings = processor(image_mean=[0.5, 0.5, 0.5])
    digests = {process.prepare(each).digest for process in (first, settings) for each in (values, other)}
    assert len(digests) == 4
    assert first.prepare(values).digest == processor().prepare(values).digest


def test_settings_are_read_as_transformers_reads_them() -> None:
    assert processor(min_pixels=5000, max_pixels=6000, size={"shortest_edge": 1}).pixels == (5000, 6000)
    files: dict[str, Any] = {
        "preprocessor_config.json": {"resample": 2},
        "processor_config.json": {"image_processor": {"resample": 1}},
    }
    assert make({"architectures": [NAMES["2"]]}, files).resample == 1
    plain = processor(do_rescale=False, do_normalize=False)
    assert plain.table[0].tolist() == list(range(256))
    assert processor().pixels == (56 * 56, 28 * 28 * 1280)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"patch_size": 16}, "patch_size = 16"),
        ({"merge_size": 1}, "merge_size = 1"),
        ({"do_resize": False}, "do_resize = False"),
        ({"resample": 77}, "resample = 77"),
        ({"image_mean": [1, 2]}, "image_mean"),
        ({"image_std": 0}, "image_std"),
        ({"rescale_factor": math.inf}, "rescale_factor"),
        ({"min_pixels": 9, "max_pixels": 8}, "size"),
        ({"max_pixels": "many"}, "max_pixels"),
    ],
)
def test_other_settings_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        processor(**settings)


def frames_of(count: int) -> list[np.ndarray]:
    return [pixels(56, 84, index) for index in range(count)]


def test_pairs_of_frames_are_the_frames_of_a_video() -> None:
    process, frames = bounded(28 * 28, 28 * 28 * 64), frames_of(3)
    video = process.prepare_video(frames, 3, fps=2.0)
    assert video.grid == (2, 4, 6)
    pairs = video.patches.reshape(2, 24, 3, 2, 14, 14)
    alone = [process.prepare(frame).patches.reshape(24, 3, 2, 14, 14) for frame in frames]
    for pair, index, frame in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 2)):
        assert np.array_equal(pairs[pair, :, :, index], alone[frame][:, :, index])


def test_a_video_is_encoded_pair_by_pair() -> None:
    video = bounded(28 * 28, 28 * 28 * 64).prepare_video(frames_of(4), 4, fps=2.0)
    first, second = video.frames
    assert first.grid == second.grid == (1, 4, 6)
    assert np.array_equal(np.concatenate([first.patches, second.patches]), video.patches)
    assert len({first.digest, second.digest, video.digest}) == 3
    (image,) = (picture := bounded(28 * 28, 28 * 28 * 64).prepare(frames_of(1)[0])).frames
    assert image is picture


def test_the_rate_of_a_video_decides_its_positions_in_time() -> None:
    timed = bounded(28 * 28, 28 * 28 * 64, NAMES["2.5"])
    slow, fast = (timed.prepare_video(frames_of(2), 2, fps=rate) for rate in (1.0, 4.0))
    assert (slow.step, fast.step) == (8.0, 2.0)
    assert slow.digest != fast.digest
    assert bounded(28 * 28, 28 * 28 * 64).prepare_video(frames_of(2), 2, fps=4.0).step == 1.0


def test_a_video_is_one_placeholder_or_one_for_each_pair() -> None:
    video = shaped((3, 4, 6), video=True)
    assert processor().expand(video) == [[VIDEO] * 18]
    assert processor(QWEN3).expand(video) == [[VIDEO] * 6] * 3


def test_a_prompt_of_qwen3_tells_the_times_of_frames() -> None:
    process, text = processor(QWEN3), "See {0} and {0}."
    block = "<|vision_start|><|video_pad|><|vision_end|>"
    assert process.timestamps(3, 2.0) == (0.25, 1.0)
    made = process.with_timestamps(text.format(block), [(3, 2.0), (2, 1.0)])
    assert made == f"See <0.2 seconds>{block}<1.0 seconds>{block} and <0.5 seconds>{block}."
    assert process.with_timestamps(text.format(block), [(3, 2.0)]) == text.format(block)
    assert processor().with_timestamps(text.format(block), [(3, 2.0), (2, 1.0)]) == text.format(block)


def test_bounds_of_a_video_by_frame_are_for_all_frames() -> None:
    process = bounded(4 * 32**2, 8 * 32**2, QWEN3)
    assert process.prepare_video(frames_of(4), 4, fps=2.0).grid == (2, 2, 2)
    assert process.prepare(frames_of(1)[0]).grid == (1, 4, 6)


@pytest.mark.parametrize(
    ("frames", "size", "least", "resized"),
    [
        (10, (793, 214), 131_072, (256, 64)),
        (15, (585, 996), 131_072, (64, 128)),
        (22, (740, 148), 4096, (192, 32)),
        (6, (890, 696), 131_072, (192, 160)),
    ],
)
def test_sizes_of_frames_are_those_of_transformers(
    frames: int, size: tuple[int, int], least: int, resized: tuple[int, int]
) -> None:
    """Values are of ``smart_resize`` in transformers' video_processing_qwen3_vl.py, for at most 200,000 pixels."""
    video = bounded(least, 200_000, QWEN3).prepare_video([np.zeros((*size, 3), np.uint8)] * frames, frames, fps=2.0)
    assert video.grid == (-(-frames // 2), resized[0] // 16, resized[1] // 16)


@pytest.mark.parametrize("architecture", [NAMES["2"], QWEN3])
def test_frames_are_within_the_encoder_programs_and_a_video_within_the_prompt(architecture: str) -> None:
    process = bounded(28 * 28, 10**7, architecture)
    frames = [pixels(700, 700, 0)] * 4
    large, small = (made.prepare_video(frames, 4, fps=2.0) for made in (process, process.within(256, 128)))
    assert large.frames[0].patches.shape[0] > 256 >= small.frames[0].patches.shape[0] > 100
    with pytest.raises(ImageError):
        process.within(256, 64).prepare_video(frames, 4, fps=2.0)


@pytest.mark.parametrize(
    ("sizes", "rate"), [([], 1.0), ([56, 28], 1.0), ([56], 0.0), ([56], math.nan), ([56] * (MOST_FRAMES + 1), 1.0)]
)
def test_other_videos_are_refused(sizes: list[int], rate: float) -> None:
    with pytest.raises(ImageError):
        processor().prepare_video((pixels(side, 56, 0) for side in sizes), len(sizes), fps=rate)
