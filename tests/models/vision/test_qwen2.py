"""Towers of Qwen2-VL and Qwen2.5-VL: layouts, padding, positions, gradients and configs. Values: `test_qwen_logits`."""

import dataclasses
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import Model
from jaxinfer.models.vision.layers import PADDING
from jaxinfer.models.vision.qwen2 import QWEN2_5_VL, QWEN2_VL, QwenTower, patch_places, place_axes, window_order
from jaxinfer.models.vision.tower import Vision
from jaxinfer.types import VISION, ImageInput, PlacedImage
from tools.oracle.images_golden import read_images, write_image_checkpoint
from tools.oracle.pictures import picture

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens" / "images"
CONFIGS = {name: read_images(GOLDENS / name).files["config.json"] for name in ("qwen2_vl", "qwen2_5_vl")}


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    golden = read_images(GOLDENS / request.param)
    folder = write_image_checkpoint(golden, tmp_path_factory.mktemp("model"))
    return load_model(str(folder), dtype="float32", show_progress=False)


def vision_of(model: Model) -> Vision:
    assert model.vision is not None
    return model.vision


def test_patches_of_a_token_are_consecutive() -> None:
    at, frames = patch_places((2, 4, 4), 2)
    assert at[:8].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert np.array_equal(at[:16], at[16:])
    assert frames.tolist() == [0] * 16 + [1] * 16


def test_windows_are_squares_and_their_rests_at_the_edges() -> None:
    order, windows = window_order((1, 3, 5), 2)
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert windows.tolist() == [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2 + [4] * 2 + [5]


def test_shapes_of_a_layout_depend_on_the_rows_alone(model: Model) -> None:
    tower = vision_of(model).module
    layouts = [tower.layout(grid, 64) for grid in ((1, 4, 4), (1, 2, 32), (4, 4, 4))]
    shapes = [{name: (value.shape, value.dtype) for name, value in layout.items()} for layout in layouts]
    assert shapes[0] == shapes[1] == shapes[2]
    assert (layouts[0]["frames"][16:] == PADDING).all()


def test_rows_of_padding_change_no_others(model: Model) -> None:
    vision = vision_of(model)
    image = vision.processor.prepare(picture(24, 40, 3))
    rows, own = 96, image.patches.shape[0]
    layout = {name: jnp.asarray(value) for name, value in vision.module.layout(image.grid, rows).items()}
    values = vision.normalised(image.patches)
    outs = [
        vision.run(model.params[VISION], jnp.pad(values, ((0, rows - own), (0, 0)), constant_values=padding), layout)
        for padding in (0.0, 50.0)
    ]
    kept = own // vision.config.merged
    assert np.array_equal(outs[0][:kept], outs[1][:kept])
    assert np.isfinite(outs[1]).all()
    np.testing.assert_allclose(outs[0][:kept], vision.encode(model.params[VISION], image), rtol=1e-4, atol=1e-5)


def test_a_larger_image_is_computed_in_blocks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = vision_of(model)
    image = vision.processor.prepare(picture(56, 64, 4))
    whole = vision.encode(model.params[VISION], image)
    monkeypatch.setattr("jaxinfer.models.vision.layers._WHOLE", 32)
    monkeypatch.setattr("jaxinfer.models.vision.layers._BLOCK", 24)
    np.testing.assert_allclose(vision.encode(model.params[VISION], image), whole, rtol=1e-4, atol=2e-5)


def test_pixels_have_gradients(model: Model, seed: int) -> None:
    """The derivative along a direction is the difference quotient."""
    vision, draw = vision_of(model), np.random.default_rng(seed)
    image = vision.processor.prepare(picture(16, 24, 5))
    pixels = vision.normalised(image.patches)
    weights = jnp.asarray(draw.normal(size=(image.patches.shape[0] // 4, vision.config.width)), jnp.float32)
    along = jnp.asarray(draw.normal(size=pixels.shape), jnp.float32) / math.sqrt(pixels.size)

    def value(pixels: jax.Array) -> jax.Array:
        return jnp.sum(weights * vision.encode(model.params[VISION], ImageInput(pixels, image.grid)))

    slope = float(jnp.vdot(jax.grad(value)(pixels), along))
    step = 2e-2
    quotient = float(value(pixels + step * along) - value(pixels - step * along)) / (2 * step)
    assert slope == pytest.approx(quotient, rel=2e-2, abs=2e-2)


def test_bfloat16_is_near_float32(model: Model) -> None:
    vision = vision_of(model)
    image = vision.processor.prepare(picture(24, 40, 6))
    rough = vision.encode(jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params[VISION]), image)
    exact = np.asarray(vision.encode(model.params[VISION], image))
    assert rough.dtype == jnp.bfloat16
    assert np.abs(np.asarray(rough, np.float32) - exact).mean() <= 0.03 * np.abs(exact).mean()


def test_text_continues_after_the_longer_side_of_an_image() -> None:
    config = QWEN2_VL.config(CONFIGS["qwen2_vl"])
    image = ImageInput(np.zeros((0, 0)), (1, 4, 6))
    axes = place_axes(config)([0] * 11, [PlacedImage(2, 8, image)])
    assert axes[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7]
    assert axes[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7]
    assert axes[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7]


def test_frames_of_a_video_are_steps_of_time_apart() -> None:
    config = QWEN2_5_VL.config(CONFIGS["qwen2_5_vl"])
    video = ImageInput(np.zeros((0, 0)), (4, 2, 2), step=1.5)
    axes = place_axes(config)([0] * 6, [PlacedImage(1, 5, video)])
    assert axes[0].tolist() == [0, 1, 2, 4, 5, 2]
    assert axes[1].tolist() == axes[2].tolist() == [0, 1, 1, 1, 1, 2]


def test_frames_with_text_between_them_are_as_images() -> None:
    config = QWEN2_5_VL.config(CONFIGS["qwen2_5_vl"])
    video = ImageInput(np.zeros((0, 0)), (2, 2, 4))
    axes = place_axes(config)([5, 1, 1, 5, 5, 1, 1, 5], [PlacedImage(1, 7, video)])
    assert axes[0].tolist() == axes[1].tolist() == [0, 1, 1, 3, 4, 5, 5, 7]
    assert axes[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("qwen2_vl", {"num_heads": 3}, "num_heads = 3"),
        ("qwen2_vl", {"in_channels": 1}, "in_channels = 1"),
        ("qwen2_vl", {"hidden_act": "swish2"}, "hidden_act"),
        ("qwen2_vl", {"depth": 10**6}, "depth = 1000000"),
        ("qwen2_vl", {"patch_size": [4, 4]}, "patch_size"),
        ("qwen2_vl", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ("qwen2_5_vl", {"window_size": 7}, "window_size = 7"),
        ("qwen2_5_vl", {"fullatt_block_indexes": [4]}, "fullatt_block_indexes"),
        ("qwen2_5_vl", {"fullatt_block_indexes": [1, 1]}, "fullatt_block_indexes"),
    ],
)
def test_other_towers_are_refused_by_name(name: str, fields: dict[str, Any], named: str) -> None:
    family = {"qwen2_vl": QWEN2_VL, "qwen2_5_vl": QWEN2_5_VL}[name]
    config = CONFIGS[name]
    with pytest.raises(ConfigError, match=named):
        family.config({**config, "vision_config": {**config["vision_config"], **fields}})


def test_a_config_without_a_tower_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="vision_config"):
        QWEN2_VL.config({"image_token_id": 3})


def test_a_processor_of_other_patches_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="patch_size = 14"):
        QWEN2_VL.processor(CONFIGS["qwen2_vl"], {"preprocessor_config.json": {"patch_size": 14}})


def test_towers_are_equal_by_config() -> None:
    config = QWEN2_VL.config(CONFIGS["qwen2_vl"])
    assert QwenTower(config) == QwenTower(dataclasses.replace(config))
    assert (config.width, config.merged, config.values, config.deep) == (32, 4, 96, 0)
