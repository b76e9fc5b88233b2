"""Towers of Qwen3-VL and Qwen3.5: interpolated positions, deepstack and configs. Values: `test_qwen_logits`."""

import pathlib
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.vision.qwen2 import patch_places
from jaxinfer.models.vision.qwen3 import QWEN3_5, QWEN3_VL, interpolation
from tools.oracle.images_golden import read_images

CONFIG = read_images(pathlib.Path(__file__).resolve().parents[2] / "goldens/images/qwen3_vl").files["config.json"]


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 6, 10), (2, 4, 2), (1, 48, 30)])
def test_positions_are_interpolated_between_the_corners(grid: tuple[int, int, int]) -> None:
    """The weighted sum of a bilinear function of the grid is this function at the place of the patch."""
    side = 7
    rows, columns = np.mgrid[:side, :side].astype(np.float64)
    table = (3 + 2 * rows - columns + 0.5 * rows * columns).reshape(-1)
    taps, weights = interpolation(grid, 2, side)
    at, _ = patch_places(grid, 2)
    y, x = (at * (side - 1) / (np.array(grid[1:]) - 1)).T
    np.testing.assert_allclose((table[taps] * weights).sum(-1), 3 + 2 * y - x + 0.5 * x * y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


def test_layers_of_deepstack_widen_a_token() -> None:
    config = QWEN3_VL.config(CONFIG)
    assert (config.deep_layers, config.deep, config.width) == ((0, 2), 2, 96)
    assert QWEN3_5.config(CONFIG).width == 32


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_position_embeddings": 35}, "num_position_embeddings = 35"),
        ({"deepstack_visual_indexes": [3]}, "deepstack_visual_indexes"),
        ({"deepstack_visual_indexes": "all"}, "deepstack_visual_indexes"),
    ],
)
def test_other_towers_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        QWEN3_VL.config({**CONFIG, "vision_config": {**CONFIG["vision_config"], **fields}})
