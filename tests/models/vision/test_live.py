"""Models with images against transformers, live on fresh seeds."""

import pathlib
from collections.abc import Callable

import pytest

from tests.models.parity import LIVE_ROOM
from tests.models.vision.towers import NAMES, QWEN, SCENES, load, logit_faults, row_error
from tools.oracle.images_golden import ImageGolden


@pytest.mark.parity
@pytest.mark.parametrize("name", [*NAMES, *QWEN])
def test_rows_and_logits_are_those_of_transformers(
    name: str, live_images: Callable[[str], ImageGolden], tmp_path: pathlib.Path
):
    golden = live_images(name)
    model = load(golden, tmp_path)
    for scene in ("text", *SCENES):
        assert (golden.seed, scene, logit_faults(model, golden.scenes[scene], LIVE_ROOM)) == (golden.seed, scene, [])
    errors = {scene: row_error(model, golden.scenes[scene]) for scene in SCENES}
    assert max(errors.values()) <= 1, (golden.seed, errors)
