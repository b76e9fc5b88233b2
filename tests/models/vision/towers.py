"""Comparison of models of towers for one picture with the golden files of `tools.oracle.images_towers`.

The rule: the largest error against transformers in float64 is at most twice that of transformers in float32, plus 1e-6.
"""

import functools
import pathlib

import jax.numpy as jnp
import numpy as np

from jaxinfer import load_model
from jaxinfer.images.processor import normalised
from jaxinfer.models.model import Model
from jaxinfer.models.vision.tower import Vision
from jaxinfer.types import VISION, ImageInput
from tools.oracle.images_golden import ImageGolden, Scene, allowed, read_images, write_image_checkpoint
from tools.oracle.pictures import picture

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens" / "images"
SCENES = ("one", "several")


@functools.cache
def golden_of(name: str) -> ImageGolden:
    return read_images(GOLDENS / name)


def load(name: str, folder: pathlib.Path) -> Model:
    written = write_image_checkpoint(golden_of(name), folder)
    return load_model(str(written), dtype="float32", show_progress=False)


def vision_of(model: Model) -> Vision:
    assert model.vision is not None
    return model.vision


def images_of(model: Model, scene: Scene) -> list[ImageInput]:
    return [vision_of(model).processor.prepare(picture(*shown)) for shown in scene.pictures]


def by_row(rows: np.ndarray, grid: tuple[int, int, int], merge: int) -> np.ndarray:
    """Return patches row by row, of patches of which those of a token are consecutive."""
    _, height, width = grid
    parts = rows.reshape(height // merge, width // merge, merge, merge, -1)
    return parts.transpose(0, 2, 1, 3, 4).reshape(height * width, -1)


def pixel_faults(model: Model, scene: Scene) -> list[str]:
    """Return what differs from transformers in the pixels of a scene, to the bit."""
    vision, found = vision_of(model), images_of(model, scene)
    merge = int(vision.config.merged**0.5)
    got = [by_row(normalised(vision.processor, image.patches), image.grid, merge) for image in found]
    faults = [] if [list(image.grid) for image in found] == scene.grids else ["grids differ"]
    return faults + ([] if np.array_equal(np.concatenate(got), scene.pixels) else ["pixels differ"])


def row_error(model: Model, scene: Scene, extra: int = 0) -> float:
    """Return the largest error of the rows of images, as a share of what is allowed.

    Args:
        extra: rows of padding in the program.
    """
    vision, params = vision_of(model), model.params[VISION]
    images = images_of(model, scene)
    rows = np.concatenate([vision.encode(params, image, len(image.patches) + extra) for image in images])
    error = np.abs(rows.astype(np.float64) - scene.rows).max()
    return float(error / allowed(scene.rows_error, np.abs(scene.rows).max()))


def logit_faults(model: Model, scene: Scene) -> list[str]:
    """Return what differs from transformers in the logits of a scene, at prefill and at decode."""
    tokens, length = scene.prompt + scene.greedy[:-1], len(scene.prompt)
    got = np.asarray(model.apply(model.params, jnp.asarray([tokens]), images_of(model, scene))[0], np.float64)
    prefill, decode = np.abs(got[:length] - scene.prefill).max(), np.abs(got[length:] - scene.decode).max(-1)
    faults = [] if prefill <= allowed(scene.prefill_error) else [f"prefill: off by {prefill}"]
    faults += [] if np.all(decode <= allowed(scene.decode_error)) else [f"decode: off by {decode}"]
    return faults + ([] if got[length - 1 :].argmax(-1).tolist() == scene.greedy else ["greedy ids differ"])
