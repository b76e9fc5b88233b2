"""Comparison of models of towers for one picture with the golden files of `tools.oracle.images_towers`.

The rule: the largest error against transformers in float64 is at most twice that of transformers in float32, plus 1e-6.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, SamplingParams, load_model
from jaxinfer.images.processor import Processor, normalised
from jaxinfer.models.model import Model
from jaxinfer.models.vision.tower import Vision
from jaxinfer.types import VISION, ImageInput
from tools.oracle.images_golden import ImageGolden, Scene, allowed, read_images, write_image_checkpoint
from tools.oracle.pictures import picture

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens" / "images"
SCENES = ("one", "several")
NAMES = ("llava", "gemma3", "mistral3", "mistral3-ministral3", "idefics3", "smolvlm")
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")


@functools.cache
def golden_of(name: str) -> ImageGolden:
    return read_images(GOLDENS / name)


def load(golden: ImageGolden, folder: pathlib.Path) -> Model:
    written = write_image_checkpoint(golden, folder)
    return load_model(str(written), dtype="float32", show_progress=False)


def vision_of(model: Model) -> Vision:
    assert model.vision is not None
    return model.vision


def images_of(model: Model, scene: Scene) -> list[ImageInput]:
    return [vision_of(model).processor.prepare(picture(*shown)) for shown in scene.pictures]


def by_row(rows: np.ndarray, grid: tuple[int, int, int], merge: int) -> np.ndarray:
    """Return patches row by row, of patches of which those of a token are consecutive."""
    frames, height, width = grid
    parts = rows.reshape(frames, height // merge, width // merge, merge, merge, -1)
    return parts.swapaxes(2, 3).reshape(len(rows), -1)


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
    frames = [frame for image in images_of(model, scene) for frame in image.frames]
    rows = np.concatenate([vision.encode(params, frame, len(frame.patches) + extra) for frame in frames])
    error = np.abs(rows.astype(np.float64) - scene.rows).max()
    return float(error / allowed(scene.rows_error, np.abs(scene.rows).max()))


def logit_faults(model: Model, scene: Scene, room: float = 1.0) -> list[str]:
    """Return what differs from transformers in the logits of a scene, at prefill and at decode.

    Args:
        room: factor of the allowed error of decode steps.
    """
    tokens, length = scene.prompt + scene.greedy[:-1], len(scene.prompt)
    got = np.asarray(model.apply(model.params, jnp.asarray([tokens]), images_of(model, scene))[0], np.float64)
    prefill, decode = np.abs(got[:length] - scene.prefill).max(), np.abs(got[length:] - scene.decode).max(-1)
    faults = [] if prefill <= allowed(scene.prefill_error) else [f"prefill: off by {prefill}"]
    faults += [] if np.all(decode <= room * allowed(scene.decode_error)) else [f"decode: off by {decode}"]
    return faults + ([] if got[length - 1 :].argmax(-1).tolist() == scene.greedy else ["greedy ids differ"])


def served_faults(model: Model, scene: Scene, **tokens: Any) -> list[str]:
    """Return what differs from transformers where an engine serves a scene, in chunks of at most 16 tokens.

    Args:
        tokens: fields of the processor that the vocabulary of the golden files sets.
    """
    vision = vision_of(model)
    process = dataclasses.replace(vision.processor, **tokens)
    model = dataclasses.replace(model, vision=dataclasses.replace(vision, processor=process))
    llm = LLM(model=model, max_num_seqs=2, max_model_len=112, page_size=16, prefill_sizes=(16,))
    shown = [picture(*each) for each in scene.pictures]
    prompt = {"prompt_token_ids": _unexpanded(scene, process), "images": shown}
    params = SamplingParams(temperature=0.0, max_tokens=len(scene.greedy), logprobs=4, ignore_eos=True)
    request = llm.generate([prompt], params)[0]
    output, logits = request.outputs[0], np.concatenate([scene.prefill[-1:], scene.decode])
    faults = [] if request.prompt_token_ids == scene.prompt else ["the prompt is expanded differently"]
    if output.token_ids != scene.greedy:
        return [*faults, f"served ids {output.token_ids}"]
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    bounds = 2 * allowed(np.append(scene.prefill_error, scene.decode_error))
    for row, got, bound in zip(logits, output.logprobs or [], bounds, strict=True):
        wrong = {token: each.logprob for token, each in got.items() if not abs(each.logprob - row[token]) <= bound}
        faults += [f"logprobs {wrong}"] if wrong else []
    return faults


def with_tower(model: Model, **changes: Any) -> Model:
    """Return a model whose tower has another config."""
    vision = vision_of(model)
    config = dataclasses.replace(vision.config, **changes)
    return model.replace(vision=dataclasses.replace(vision, config=config, module=vision.module.clone(config=config)))


def edited(name: str, field: str, value: Any) -> dict[str, Any]:
    """Return a golden file's config.json with another value of a field, ``outer.inner`` for one of an object."""
    config = {**golden_of(name).files["config.json"]}
    outer, _, inner = field.partition(".")
    config[outer] = {**config[outer], inner: value} if inner else value
    return config


def _unexpanded(scene: Scene, process: Processor) -> list[int]:
    """Return the prompt of a scene with placeholders."""
    prompt, done = list(scene.prompt), 0
    for shown in scene.pictures:
        (piece,) = process.expand(process.prepare(picture(*shown)))
        done = next(at for at in range(done, len(prompt)) if prompt[at : at + len(piece)] == piece)
        prompt[done : done + len(piece)] = [process.image_token]
        done += 1
    return prompt
