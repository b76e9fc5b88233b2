"""Tests of the places of images in prompts."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from jaxinfer.images.placed import place_images
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import ImageInput, PlacedImage
from tests.fake_vision_processor import IMAGE, FakeProcessor


def image(rows: int, columns: int) -> ImageInput:
    return ImageInput(np.zeros((rows * columns, 3), np.uint8), (1, rows, columns), f"{rows}x{columns}")


def test_each_placeholder_becomes_the_tokens_of_its_image() -> None:
    first, second = image(2, 4), image(4, 6)
    for ids in ([1, IMAGE, 2, 3, IMAGE], array("i", [1, IMAGE, 2, 3, IMAGE]), (1, IMAGE, 2, 3, IMAGE)):
        made, placed = place_images("prompt", ids, FakeProcessor(), [first, second])
        assert made == [1, IMAGE, IMAGE, 2, 3, *[IMAGE] * 6]
        assert placed == (PlacedImage(1, 3, first), PlacedImage(5, 11, second))


def test_a_text_stays_as_it_is() -> None:
    assert place_images("prompt", [1, 2], FakeProcessor(), []) == ([1, 2], ())


@pytest.mark.parametrize(("ids", "count"), [([1, IMAGE], 0), ([1, 2], 1), ([IMAGE, IMAGE, IMAGE], 2)])
def test_other_numbers_of_placeholders_are_refused(ids: list[int], count: int) -> None:
    with pytest.raises(RequestError) as refused:
        place_images("prompt", ids, FakeProcessor(), [image(2, 2)] * count)
    assert refused.value.field == "prompt"
