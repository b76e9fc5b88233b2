"""Image processor of Idefics3 and SmolVLM against transformers."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxinfer.images.idefics3 import TileProcessor, make
from jaxinfer.images.processor import ImageError, VideoProcessor, smallest_image
from jaxinfer.types import ImageInput
from tests.images.towers import cases_of, faults, id_of, noise, prompt_faults, shaped

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
NAMES = (AROUND, WHOLE, "\n", "\n\n", *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)))
IDS = {name: 100 + index for index, name in enumerate(NAMES)}


def processor(tile: int = 16, longest: int = 48, patch: int = 4, merge: int = 2, **settings: Any) -> TileProcessor:
    config = {"vision_config": {"image_size": tile, "patch_size": patch}, "scale_factor": merge, "image_token_id": 7}
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    return make(config, {"preprocessor_config.json": {**sizes, **settings}})


@pytest.mark.parametrize("case", cases_of("idefics3"), ids=lambda case: str(case["settings"]))
def test_pixels_are_those_of_transformers(case: dict[str, Any]) -> None:
    own = case["settings"]
    sizes = (own[name]["longest_edge"] for name in ("max_image_size", "size"))
    others = {name: own[name] for name in own if name not in ("max_image_size", "size")}
    assert faults(processor(*sizes, case["patch"], case.get("merge", 1), **others), case) == []


def test_prompts_are_those_of_transformers() -> None:
    vocabulary = id_of()
    config = {"vision_config": {"image_size": 16, "patch_size": 4}, "image_token_id": vocabulary("<image>")}
    settings = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    process = make(config, {"preprocessor_config.json": settings}).with_tokens(vocabulary)
    assert prompt_faults("idefics3", process) == []


def tiled(tiles: tuple[int, int] | None) -> ImageInput:
    return dataclasses.replace(shaped((1, 4, 4)), tiles=tiles)


def test_tokens_of_tiles_are_between_those_of_the_vocabulary() -> None:
    soft, process = [7] * 4, processor().with_tokens(IDS.get)
    assert process.expand(tiled(None)) == [[100, 101, *soft, 100]]
    whole = [103, 100, 101, *soft, 100]
    assert process.expand(tiled((1, 2))) == [[100, 104, *soft, 100, 105, *soft, *whole]]
    assert process.expand(tiled((2, 1))) == [[100, 104, *soft, 102, 100, 107, *soft, *whole]]


@pytest.mark.parametrize("spelt", ["\n", "Ċ"])
def test_two_newlines_may_be_one_token(spelt: str) -> None:
    """Vocabularies of bytes spell a newline otherwise."""
    ids = {name: token for name, token in IDS.items() if "\n" not in name}
    (both,) = processor().with_tokens({**ids, spelt: 5, spelt * 2: 6}.get).expand(tiled((2, 1)))
    assert (both.count(5), both.count(6)) == (1, 1)
    (one,) = processor().with_tokens({**ids, spelt: 5}.get).expand(tiled((2, 1)))
    assert one.count(5) == 3


@pytest.mark.parametrize("name", [AROUND, WHOLE, "\n", "<row_1_col_2>"])
def test_a_vocabulary_without_a_token_is_refused(name: str) -> None:
    ids = {other: token for other, token in IDS.items() if other != name}
    with pytest.raises(ImageError) as refused:
        processor().with_tokens(ids.get).expand(tiled((1, 2)))
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize(
    ("height", "width", "tiles"),
    [(30, 30, (3, 3)), (10, 30, (1, 3)), (30, 10, (3, 1)), (1, 500, (1, 3)), (33, 48, (3, 3)), (20, 31, (2, 3))],
)
def test_each_tile_and_the_whole_picture_are_frames(height: int, width: int, tiles: tuple[int, int]) -> None:
    process = processor().with_tokens(IDS.get)
    image = process.prepare(noise(height, width))
    assert (image.tiles, image.grid) == (tiles, (tiles[0] * tiles[1] + 1, 4, 4))
    assert [frame.patches.shape for frame in image.frames] == [(process.most_rows, 48)] * image.grid[0]
    assert not any(frame.video for frame in image.frames)
    (piece,) = process.expand(image)
    assert piece.count(7) * 4 == len(image.patches)


def test_digests_tell_rows_of_tiles_from_columns() -> None:
    """Pixels of pictures of one colour are the same."""
    wide, tall = (processor().prepare(np.full((*shape, 3), 9, np.uint8)) for shape in ((10, 30), (30, 10)))
    assert np.array_equal(wide.patches, tall.patches)
    assert wide.digest != tall.digest


@pytest.mark.parametrize(("most", "tiles"), [(48**2, (3, 3)), (32**2 + 100, (2, 2)), (16**2, None), (1, None)])
def test_a_request_may_ask_for_fewer_tiles(most: int, tiles: tuple[int, int] | None) -> None:
    """The pixels are those of a processor with such a size."""
    made = processor().prepare(noise(60, 60), max_pixels=most)
    longest = 16 * (tiles or (1, 1))[0]
    assert made.tiles == tiles
    assert np.array_equal(made.patches, processor(longest=longest).prepare(noise(60, 60)).patches)


def test_the_smallest_image_is_one_tile() -> None:
    assert smallest_image(processor()).grid == (1, 4, 4)


def test_videos_are_not_read() -> None:
    assert not isinstance(processor(), VideoProcessor)


@pytest.mark.parametrize("options", [{"max_pixels": 0}, {"min_pixels": 4}, {"do_image_splitting": False}])
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ImageError, match=next(iter(options))):
        processor().prepare(noise(9, 9), **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", {"height": 16, "width": 16}),
        ("size", {"longest_edge": 4097}),
        ("max_image_size", {"longest_edge": 32}),
        ("do_resize", False),
        ("image_processor_type", "CLIPImageProcessor"),
    ],
)
def test_settings_that_are_not_supported_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"preprocessor_config.json: {name} = "):
        processor(**{name: value})


def test_a_scale_must_divide_a_tile() -> None:
    with pytest.raises(ValueError, match="image_size = 16 must be a multiple of 3 x 3 patches"):
        processor(merge=3)
