"""Images at their places in expanded prompts; what the processors expand to is tested with them."""

import dataclasses
from array import array

import numpy as np
import pytest
from PIL import Image

from jaxinfer.images.expansion import expanded, for_vocabulary, place_images
from jaxinfer.images.processor import ImageError
from jaxinfer.images.registry import ProcessorSource
from jaxinfer.models.vision.registry import VISION_FAMILIES
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import ImageInput, PlacedImage
from tests.fake_vision_processor import IMAGE as PLACEHOLDER
from tests.fake_vision_processor import FakeProcessor
from tests.images import test_clip, test_pixtral, test_qwen, test_siglip
from tests.images.test_qwen import IMAGE, VIDEO
from tests.images.towers import shaped

GRID = (1, 4, 4)


def test_ranges_reach_from_the_first_row_of_an_image_to_the_last() -> None:
    gemma = test_siglip.processor({"size": 8})
    ids, ranges = expanded(gemma, [107, 255_999, 255_999, 5], [shaped(GRID)] * 2)
    assert ids[0] == 109
    assert [set(ids[start:stop]) for start, stop, _ in ranges] == [{262_144}] * 2
    assert [(ids[start - 1], ids[stop], stop - start) for start, stop, _ in ranges] == [(255_999, 256_000, 4)] * 2
    image = shaped((1, 4, 6))
    assert expanded(test_pixtral.processor(), [7, 10, 8], [image]) == (
        [7, 10, 10, 10, 12, 10, 10, 10, 13, 8],
        (PlacedImage(1, 8, image),),
    )


def test_images_and_videos_take_their_own_placeholders() -> None:
    image, video, single = shaped((1, 2, 4)), shaped((2, 2, 2), video=True), shaped((1, 2, 2), video=True)
    prompt = [1, VIDEO, 2, IMAGE, VIDEO]
    ids, placed = expanded(test_qwen.processor(), prompt, [image, video, single])
    assert ids == [1, VIDEO, VIDEO, 2, IMAGE, IMAGE, VIDEO]
    assert placed == (PlacedImage(1, 3, video), PlacedImage(4, 6, image), PlacedImage(6, 7, single))


def test_text_may_stand_between_the_frames_of_a_video() -> None:
    video = shaped((2, 2, 4), video=True)
    ids, placed = expanded(test_qwen.processor(test_qwen.QWEN3), [1, VIDEO, 5, VIDEO, 6], [video])
    assert ids == [1, VIDEO, VIDEO, 5, VIDEO, VIDEO, 6]
    assert placed == (PlacedImage(1, 6, video),)
    with pytest.raises(ImageError):
        expanded(test_qwen.processor(test_qwen.QWEN3), [1, VIDEO, 5], [video])


def test_text_has_no_ranges() -> None:
    assert expanded(test_siglip.processor({"size": 8}), [107, 107], []) == ([107, 107], ())


def test_processors_whose_tokens_are_named_by_the_vocabulary() -> None:
    found = {"[IMG_BREAK]": 3, "[IMG_END]": 4, "\n": 5, "\n\n": 6}.get
    clip, pixtral = test_clip.processor(test_clip.SQUARE, 48), test_pixtral.processor()
    assert for_vocabulary(clip, found) is clip
    assert for_vocabulary(pixtral, found) == dataclasses.replace(pixtral, break_token=3, end_token=4)
    image = ImageInput(np.zeros((16, 48), np.uint8), GRID)
    with pytest.raises(RequestError, match="the vocabulary must have"):
        place_images("prompt", [10], for_vocabulary(pixtral, {}.get), [image])


@pytest.mark.parametrize(
    ("architecture", "rows"),
    [("Qwen2VLForConditionalGeneration", 256), ("Mistral3ForConditionalGeneration", 400)],
)
def test_a_larger_image_is_made_smaller_where_there_are_several_sizes(architecture: str, rows: int) -> None:
    """An engine has no program for more rows."""
    vision = {"image_size": 1540, "patch_size": 14, "hidden_size": 64}
    config = {"architectures": [architecture], "vision_config": vision, "image_token_id": 10}
    source = ProcessorSource(VISION_FAMILIES[architecture].maker, config, {})
    large = Image.new("RGB", (1500, 900))
    assert source.processor().prepare(large).patches.shape[0] > rows
    made = dataclasses.replace(source, rows=rows).processor().prepare(large)
    assert rows / 3 < made.patches.shape[0] <= rows
    small = Image.new("RGB", (112, 112))
    assert dataclasses.replace(source, rows=rows).processor().prepare(small).grid == (1, 8, 8)


def image_of(rows: int, columns: int) -> ImageInput:
    return ImageInput(np.zeros((rows * columns, 3), np.uint8), (1, rows, columns), f"{rows}x{columns}")


def test_each_placeholder_becomes_the_tokens_of_its_image() -> None:
    first, second = image_of(2, 4), image_of(4, 6)
    for ids in (
        [1, PLACEHOLDER, 2, 3, PLACEHOLDER],
        array("i", [1, PLACEHOLDER, 2, 3, PLACEHOLDER]),
        (1, PLACEHOLDER, 2, 3, PLACEHOLDER),
    ):
        made, placed = place_images("prompt", ids, FakeProcessor(), [first, second])
        assert made == [1, PLACEHOLDER, PLACEHOLDER, 2, 3, *[PLACEHOLDER] * 6]
        assert placed == (PlacedImage(1, 3, first), PlacedImage(5, 11, second))


def test_a_text_stays_as_it_is() -> None:
    assert place_images("prompt", [1, 2], FakeProcessor(), []) == ([1, 2], ())


@pytest.mark.parametrize(
    ("ids", "count"), [([1, PLACEHOLDER], 0), ([1, 2], 1), ([PLACEHOLDER, PLACEHOLDER, PLACEHOLDER], 2)]
)
def test_other_numbers_of_placeholders_are_refused(ids: list[int], count: int) -> None:
    with pytest.raises(RequestError) as refused:
        place_images("prompt", ids, FakeProcessor(), [image_of(2, 2)] * count)
    assert refused.value.field == "prompt"
