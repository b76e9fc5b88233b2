"""Gemma 3's image processor against transformers."""

from typing import Any

import pytest

from jaxinfer.images.processor import ImageError
from jaxinfer.images.siglip import SiglipProcessor, make
from tests.images.towers import cases_of, faults, id_of, noise, prompt_faults, shaped


def processor(
    settings: dict[str, Any], side: int = 8, patch: int = 2, tokens: int = 4, **config: Any
) -> SiglipProcessor:
    config = {"vision_config": {"image_size": side, "patch_size": patch}, "mm_tokens_per_image": tokens, **config}
    return make(config, {"preprocessor_config.json": settings})


@pytest.mark.parametrize("case", cases_of("siglip"), ids=lambda case: str(case["settings"]))
def test_pixels_are_those_of_transformers(case: dict[str, Any]) -> None:
    side = case["settings"].get("size", {}).get("height", 224)
    process = processor(case["settings"], side, case["patch"], 256)
    assert (process.merge, process.most_rows) == (case.get("merge", 1), (side // 14) ** 2)
    assert faults(process, case) == []


def test_prompts_are_those_of_transformers_with_newlines_that_merge() -> None:
    """Newlines before and after an image, between two images, and around text are one token where they meet."""
    vocabulary = id_of()
    ids = {name: vocabulary(f"<{name}>") for name in ("boi", "soft", "eoi")}
    tokens = {"boi_token_index": ids["boi"], "image_token_index": ids["soft"], "eoi_token_index": ids["eoi"]}
    process = processor({"size": 8}, **tokens).with_tokens(vocabulary)
    assert prompt_faults("siglip", process) == []


def test_tokens_of_gemma_3_are_the_default() -> None:
    process = processor({"size": 8})
    assert process.of_square() == [108, 255_999, *[262_144] * 4, 256_000, 108]
    assert process.merges[107, 108] == 109


def test_a_vocabulary_without_two_newlines_is_refused() -> None:
    with pytest.raises(ImageError, match="two newlines"):
        processor({"size": 8}).with_tokens({"\n": 3}.get).expand(shaped((1, 4, 4)))


@pytest.mark.parametrize(("tokens", "named"), [(9, "tokens_per_image = 9"), (36, "= 36"), (8, "= 8"), (25, None)])
def test_tokens_are_squares_of_patches(tokens: int, named: str | None) -> None:
    if named is None:
        assert len(processor({"size": 10}, 10, 2, tokens).of_square()) == tokens + 4
        return
    with pytest.raises(ValueError, match=named):
        processor({"size": 10}, 10, 2, tokens)


def test_options_are_refused() -> None:
    with pytest.raises(ImageError, match="do_pan_and_scan"):
        processor({"size": 8}).prepare(noise(9, 9), do_pan_and_scan=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", {"height": 9, "width": 8}),
        ("size", {"shortest_edge": 8}),
        ("do_pan_and_scan", True),
        ("do_center_crop", True),
        ("image_processor_type", "CLIPImageProcessor"),
        ("image_processor_type", 3),
    ],
)
def test_settings_that_are_not_supported_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"preprocessor_config.json: {name} = "):
        processor({"size": 8, name: value})
