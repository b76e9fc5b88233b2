"""Mistral's image processor against transformers."""

from typing import Any

import pytest

from jaxinfer.images.pixtral import PixtralProcessor, make
from jaxinfer.images.processor import ImageError
from tests.images.towers import cases_of, faults, id_of, noise, prompt_faults, shaped

SETTINGS: dict[str, Any] = {"size": {"longest_edge": 40}}


def processor(settings: dict[str, Any] = SETTINGS, patch: int = 4, merge: int = 2, **config: Any) -> PixtralProcessor:
    config = {"vision_config": {"patch_size": patch}, "spatial_merge_size": merge, **config}
    return make(config, {"preprocessor_config.json": settings})


@pytest.mark.parametrize("case", cases_of("pixtral"), ids=lambda case: str(case["settings"]))
def test_pixels_are_those_of_transformers(case: dict[str, Any]) -> None:
    assert faults(processor(case["settings"], case["patch"], case.get("merge", 1)), case) == []


def test_prompts_are_those_of_transformers() -> None:
    vocabulary = id_of()
    process = processor(image_token_index=vocabulary("[IMG]")).with_tokens(vocabulary)
    assert prompt_faults("pixtral", process) == []


def test_tokens_of_mistral_are_the_default() -> None:
    assert processor().expand(shaped((1, 4, 4))) == [[10, 10, 12, 10, 10, 13]]


def test_a_vocabulary_without_the_tokens_is_refused() -> None:
    with pytest.raises(ImageError, match="IMG_END"):
        processor().with_tokens({"[IMG_BREAK]": 3}.get).expand(shaped((1, 4, 4)))


@pytest.mark.parametrize(("height", "width"), [(40, 40), (39, 41), (500, 37), (1, 40), (100, 100)])
def test_no_picture_has_more_rows_than_the_processor_says(height: int, width: int) -> None:
    process = processor()
    rows = len(process.prepare(noise(height, width)).patches)
    assert rows <= process.most_rows == 100


@pytest.mark.parametrize(("most", "grid"), [(256, (1, 4, 4)), (300, (1, 4, 4)), (1, (1, 2, 2)), (10**9, (1, 8, 10))])
def test_a_request_may_ask_for_fewer_pixels(most: int, grid: tuple[int, int, int]) -> None:
    assert processor().prepare(noise(60, 90), max_pixels=most).grid == grid


@pytest.mark.parametrize("options", [{"max_pixels": 0}, {"max_pixels": "9"}, {"min_pixels": 4}, {"size": 8}])
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ImageError, match=next(iter(options))):
        processor().prepare(noise(9, 9), **options)


def test_a_narrow_picture_is_refused() -> None:
    with pytest.raises(ImageError, match="90 x 1 "):
        processor().prepare(noise(1, 90))


@pytest.mark.parametrize(("name", "value"), [("size", {"shortest_edge": 4}), ("do_center_crop", True)])
def test_settings_that_are_not_supported_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"preprocessor_config.json: {name} = "):
        processor({**SETTINGS, name: value})


def test_a_merge_must_be_positive() -> None:
    with pytest.raises(ValueError, match="spatial_merge_size = 0"):
        processor(merge=0)
