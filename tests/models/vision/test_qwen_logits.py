"""Qwen's vision models against transformers: rows of images, rotary positions, and logits at prefill and decode.

The rule: the largest error against transformers in float64 is at most twice that of transformers in float32, plus 1e-6.
"""

import copy
import functools
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.config import EngineConfig
from jaxinfer.engine.distributed.make import make_engine
from jaxinfer.images.processor import normalised
from jaxinfer.images.qwen import QwenProcessor
from jaxinfer.models.model import Model
from jaxinfer.models.vision.tower import Vision
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import VISION, ImageInput, Request
from tools.oracle.images_golden import ImageGolden, Scene, allowed, read_images, write_image_checkpoint
from tools.oracle.pictures import picture

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens" / "images"
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
SCENES = ("one", "several", "clip")

MISTAKES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "no windows": ("qwen2_5_vl", {"fullatt_block_indexes": [0, 1, 2, 3]}, {}),
    "other windows": ("qwen2_5_vl", {"window_size": 24}, {}),
    "windows in all layers": ("qwen2_5_vl", {"fullatt_block_indexes": []}, {}),
    "another frequency on the time axis": ("qwen2_5_vl", {}, {"mrope_section": [3, 2, 3]}),
    "one axis": ("qwen3_vl", {}, {"mrope_section": [8, 0, 0]}),
    "one axis of some frequencies": ("qwen3_5", {}, {"mrope_section": [8, 0, 0]}),
    "other activation": ("qwen2_vl", {"hidden_act": "gelu"}, {}),
    "other base of the tower's frequencies": ("qwen3_5", {"rope_parameters": {"rope_theta": 5000.0}}, {}),
}
"""Family, and edits of the tower's config and of the RoPE settings."""


@functools.cache
def golden_of(name: str) -> ImageGolden:
    return read_images(GOLDENS / name)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageGolden, Model]:
    golden = golden_of(request.param)
    folder = write_image_checkpoint(golden, tmp_path_factory.mktemp("model"))
    return golden, load_model(str(folder), dtype="float32", show_progress=False)


def vision_of(model: Model) -> Vision:
    assert model.vision is not None
    return model.vision


def images_of(model: Model, scene: Scene) -> list[ImageInput]:
    process = vision_of(model).processor
    assert isinstance(process, QwenProcessor)
    if scene.clip is None:
        return [process.prepare(picture(*each)) for each in scene.pictures]
    frames, height, width, rate = scene.clip
    shown = [picture(int(height), int(width), 100 + index) for index in range(int(frames))]
    return [process.prepare_video(shown, len(shown), fps=rate)]


@pytest.mark.parametrize("name", SCENES)
def test_pixels_are_those_of_transformers(loaded: tuple[ImageGolden, Model], name: str) -> None:
    golden, model = loaded
    scene, images = golden.scenes[name], images_of(model, golden.scenes[name])
    process = vision_of(model).processor
    assert np.array_equal(np.concatenate([normalised(process, image.patches) for image in images]), scene.pixels)
    assert [list(image.grid) for image in images] == scene.grids


@pytest.mark.parametrize("name", SCENES)
def test_rows_are_those_of_transformers(loaded: tuple[ImageGolden, Model], name: str) -> None:
    golden, model = loaded
    scene, vision = golden.scenes[name], vision_of(model)
    frames = [frame for image in images_of(model, scene) for frame in image.frames]
    rows = np.concatenate([vision.encode(model.params[VISION], frame) for frame in frames])
    error = np.abs(rows.astype(np.float64) - scene.rows).max()
    assert error <= allowed(scene.rows_error, np.abs(scene.rows).max())


@pytest.mark.parametrize("name", SCENES)
def test_positions_are_those_of_transformers(loaded: tuple[ImageGolden, Model], name: str) -> None:
    golden, model = loaded
    scene, vision = golden.scenes[name], vision_of(model)
    prompt = scene.prompt
    axes = vision.axes(prompt, vision.place(prompt, images_of(model, scene)))
    assert axes is not None
    assert axes.tolist() == scene.axes.tolist()
    assert axes.max() + 1 - len(prompt) == scene.delta


@pytest.mark.parametrize("name", ["text", *SCENES])
def test_logits_are_those_of_transformers(loaded: tuple[ImageGolden, Model], name: str) -> None:
    golden, model = loaded
    scene = golden.scenes[name]
    tokens, length = scene.prompt + scene.greedy[:-1], len(scene.prompt)
    images = images_of(model, scene)
    logits = np.asarray(model.apply(model.params, jnp.asarray([tokens]), images)[0], np.float64)
    prefill, decode = np.abs(logits[:length] - scene.prefill).max(), np.abs(logits[length:] - scene.decode).max(-1)
    assert prefill <= allowed(scene.prefill_error)
    assert np.all(decode <= allowed(scene.decode_error))
    assert logits[length - 1 :].argmax(-1).tolist() == scene.greedy


@pytest.mark.parametrize("name", ["several", "clip"])
def test_served_tokens_are_those_of_transformers(loaded: tuple[ImageGolden, Model], name: str) -> None:
    """In chunks of 16 tokens, which split images and videos."""
    golden, model = loaded
    scene, images = golden.scenes[name], images_of(model, golden.scenes[name])
    placed = vision_of(model).place(scene.prompt, images)
    config = EngineConfig(max_num_seqs=2, max_model_len=192, page_size=16, prefill_sizes=(16,), num_pages=40)
    engine = make_engine(model, config, "cpu")
    params = SamplingParams(temperature=0.0, max_tokens=len(scene.greedy), ignore_eos=True)
    engine.add(Request("a", tuple(scene.prompt), params, images=placed))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    assert tokens == scene.greedy


@pytest.mark.parametrize("mistake", MISTAKES)
def test_typical_mistakes_are_beyond_the_rule(mistake: str, tmp_path: pathlib.Path) -> None:
    name, tower, rope = MISTAKES[mistake]
    golden, config = golden_of(name), copy.deepcopy(golden_of(name).files["config.json"])
    config["vision_config"] |= tower
    text = config.get("text_config", config)
    text["rope_scaling" if "rope_scaling" in text else "rope_parameters"] |= rope
    write_image_checkpoint(golden, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, scene = load_model(str(tmp_path), dtype="float32", show_progress=False), golden.scenes["several"]
    logits = model.apply(model.params, jnp.asarray([scene.prompt]), images_of(model, scene))[0]
    assert np.abs(np.asarray(logits, np.float64) - scene.prefill).max() > 100 * allowed(scene.prefill_error)
