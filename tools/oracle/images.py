"""Oracle of models with images: ``python -m tools.oracle.images {make,check} FOLDER [--case NAME]``.

transformers' PIL processors make the pixels; its models, in float64 and float32, the rows of images, the rotary
positions, and the logits at prefill and at decode steps. ``pictures FILE`` writes digests of the pixels of many
pictures.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import PIL
import torch
import transformers
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tools.oracle.golden import digest, uniform, write_json
from tools.oracle.images_golden import ImageGolden, Scene, image_tensors, read_images
from tools.oracle.pictures import FILES, HANDED, picture
from tools.oracle.run import AllDouble, NoFloat32, build, checkpoint_shapes, choices, read_checkpoint

DECODE_STEPS = 12
MIN_MARGIN = 0.005
MIN_DISTINCT = 3
TRIES = 400
REPRODUCED = 1e-6  # float32 copies of float64
START, END, IMAGE, VIDEO = 60, 61, 62, 63
TEXT = 58  # ids below are text


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a scene shows: sizes of pictures, or a clip (frames, height, width, rate)."""

    sizes: tuple[tuple[int, int], ...] = ()
    clip: tuple[int, int, int, float] | None = None


@dataclasses.dataclass(frozen=True)
class Pixels:
    """Images as a model of transformers reads them.

    Attributes:
        values: normalised pixels of all images, as the processor returns them.
        grids: frames, rows and columns of patches of each image.
        inputs: further arguments of the model.
    """

    values: np.ndarray
    grids: list[list[int]]
    inputs: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ImageCase:
    """A tiny model, and how transformers is asked.

    Attributes:
        files: config.json, and settings of the processor, by name.
        plans: scenes by name.
        pixels: makes the pixels of a scene's pictures.
        prompt: makes a prompt from text ids and the images.
        rows: computes the rows of the images [tokens, width] from the pixels, in the model's dtype.
        inputs: arguments of the model for a prompt with images.
        positions: computes rotary positions [3, T] and the delta from these arguments; None: those of text.
        seed: of the weights, and the first that is tried for prompts.
    """

    name: str
    files: Mapping[str, Mapping[str, Any]]
    plans: Mapping[str, Plan]
    pixels: Callable[[ImageCase, list[PIL.Image.Image], Plan], Pixels]
    prompt: Callable[[ImageCase, list[int], Pixels], list[int]]
    rows: Callable[[Any, Pixels, torch.dtype], torch.Tensor]
    inputs: Callable[[Any, list[int], Pixels, torch.dtype], dict[str, Any]]
    positions: Callable[[Any, dict[str, Any]], tuple[np.ndarray, int]] | None = None
    norm_centre: float = 1.0
    seed: int = 1


@torch.no_grad()
def followed(model: Any, inputs: dict[str, Any], ids: list[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return logits of the prompt [T, V] and of decode steps [N, V]; feed ``ids``, or greedy choices if None."""
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    out = model(**inputs, use_cache=True)
    prefill, decode, last = out.logits[0], [], out.logits[0, -1]
    for step in range(DECODE_STEPS):
        token = int(last.argmax()) if ids is None else ids[step]
        out = model(input_ids=torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        last = out.logits[0, -1]
        decode.append(last)
    return prefill.numpy(), torch.stack(decode).numpy()


class Double:
    """Context in which a model computes in float64 alone."""

    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)
        self.modes = AllDouble(), NoFloat32()
        for mode in self.modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*error)
        torch.set_default_dtype(torch.float32)


def text_ids(seed: int, count: int) -> list[int]:
    return [int(value) for value in (uniform(seed, "prompt", (count,)) + 1.0) / 2.0 * TEXT]


def asked(case: ImageCase, plan: Plan, seed: int, double: Any, single: Any) -> Scene | None:
    """Return transformers' results for one prompt; None if a choice is close or the text monotonous."""
    shown = [[*size, index + 1] for index, size in enumerate(plan.sizes)]
    frames = [] if plan.clip is None else [[*plan.clip[1:3], 100 + index] for index in range(plan.clip[0])]
    pixels = case.pixels(case, [picture(*each) for each in shown or frames], plan)
    prompt = case.prompt(case, text_ids(seed, 64), pixels)
    inputs = case.inputs(double, prompt, pixels, torch.float64)
    with torch.no_grad(), Double():
        rows = case.rows(double, pixels, torch.float64).numpy()
        axes, delta = (np.zeros((0, 0)), 0) if case.positions is None else case.positions(double, inputs)
        prefill, decode = followed(double, inputs, None)
    greedy, margin = choices(prefill, decode)
    if margin < MIN_MARGIN or len(set(greedy)) < MIN_DISTINCT or max(greedy) >= TEXT:
        return None
    rough = case.inputs(single, prompt, pixels, torch.float32)
    with torch.no_grad():
        rough_rows = case.rows(single, pixels, torch.float32).numpy()
    rough_prefill, rough_decode = followed(single, rough, greedy)
    return Scene(
        prompt=prompt,
        pictures=shown,
        clip=None if plan.clip is None else list(plan.clip),
        grids=pixels.grids,
        greedy=greedy,
        delta=delta,
        pixels=pixels.values.astype(np.float32),
        rows=rows.astype(np.float32),
        axes=np.asarray(axes, np.int32),
        prefill=prefill.astype(np.float32),
        decode=decode.astype(np.float32),
        rows_error=_most(rough_rows - rows),
        prefill_error=_most(rough_prefill - prefill),
        decode_error=np.abs(rough_decode - decode).max(-1),
        margin=margin,
    )


def _most(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))


def make(case: ImageCase) -> ImageGolden:
    """Return the record of a case: the first prompt of each scene with clear margins.

    Raises:
        RuntimeError: none of ``TRIES`` prompts has clear margins.
    """
    torch.set_num_threads(1)
    seed = case.seed
    config = dict(case.files["config.json"])
    double, single = (build(config, dtype) for dtype in (torch.float64, torch.float32))
    shapes = checkpoint_shapes(build(config, torch.float32))
    tensors = image_tensors(seed, shapes, case.norm_centre)
    state = read_checkpoint(config, tensors)
    double.load_state_dict(state)
    single.load_state_dict(state)
    scenes = {}
    for name, plan in case.plans.items():
        tries = (asked(case, plan, trial, double, single) for trial in range(seed, seed + TRIES))
        found = next((scene for scene in tries if scene is not None), None)
        if found is None:
            raise RuntimeError(f"{case.name}, {name}: no prompt gives margins of {MIN_MARGIN}")
        scenes[name] = found
    modules = (torch, transformers, np, PIL)
    return ImageGolden(
        name=case.name,
        files={name: dict(content) for name, content in case.files.items()},
        seed=seed,
        shapes=shapes,
        weights_sha256=digest(tensors),
        scenes=scenes,
        versions={module.__name__: module.__version__ for module in modules},
        norm_centre=case.norm_centre,
    )


def differences(fresh: ImageGolden, stored: ImageGolden) -> list[str]:
    """Return a line for each difference."""
    wrong = [
        f"{fresh.name}: {key} differs"
        for key in ("files", "shapes", "weights_sha256")
        if getattr(fresh, key) != getattr(stored, key)
    ]
    for name, scene in stored.scenes.items():
        now = fresh.scenes[name]
        same = ("prompt", "grids", "greedy", "delta")
        wrong += [f"{fresh.name}, {name}: {key} differs" for key in same if getattr(scene, key) != getattr(now, key)]
        for key in ("pixels", "rows", "axes", "prefill", "decode"):
            off = _most(getattr(scene, key).astype(np.float64) - getattr(now, key))
            wrong += [f"{fresh.name}, {name}: {key} is off by {off:.1e}"] if off > REPRODUCED else []
    return wrong


# ---- Qwen


def _qwen_pixels(case: ImageCase, shown: list[PIL.Image.Image], plan: Plan) -> Pixels:
    if not shown:
        return Pixels(np.zeros((0, 0), np.float32), [], {})
    made = Qwen2VLImageProcessorPil(**case.files["preprocessor_config.json"])(images=shown, return_tensors="np")
    values, grids = made["pixel_values"], made["image_grid_thw"].tolist()
    if plan.clip is None:
        return Pixels(values, grids, {})
    vision = case.files["config.json"]["vision_config"]
    size = vision["patch_size"]
    frames = values.reshape(len(shown), -1, 3, 2, size, size)
    frames = np.concatenate([frames, frames[-1:]] if len(shown) % 2 else [frames])
    pairs = np.stack([frames[0::2, :, :, 0], frames[1::2, :, :, 0]], axis=3)
    per_grid = {"second_per_grid_ts": [2 / plan.clip[3]]} if "tokens_per_second" in vision else {}
    return Pixels(pairs.reshape(-1, values.shape[1]), [[len(pairs), *grids[0][1:]]], {"clip": True, **per_grid})


def _qwen_prompt(case: ImageCase, text: list[int], pixels: Pixels) -> list[int]:
    by_frame, clip = "num_position_embeddings" in case.files["config.json"]["vision_config"], "clip" in pixels.inputs
    prompt = text[:5]
    for index, (frames, height, width) in enumerate(pixels.grids):
        parts = [frames] if not (clip and by_frame) else [1] * frames
        for part in parts:
            tokens = part * height * width // 4
            prompt += [*text[6 + index : 9 + index], START, *[VIDEO if clip else IMAGE] * tokens, END]
    return prompt + text[20 : 24 if pixels.grids else 40]


def _qwen_inputs(model: Any, prompt: list[int], pixels: Pixels, dtype: torch.dtype) -> dict[str, Any]:
    ids = torch.tensor([prompt])
    if not pixels.grids:
        return {"input_ids": ids}
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    values, grids = torch.tensor(pixels.values, dtype=dtype), torch.tensor(pixels.grids)
    names = ("pixel_values_videos", "video_grid_thw") if "clip" in pixels.inputs else ("pixel_values", "image_grid_thw")
    rest = {name: value for name, value in pixels.inputs.items() if name != "clip"}
    return {"input_ids": ids, "mm_token_type_ids": kinds, names[0]: values, names[1]: grids, **rest}


def _qwen_rows(model: Any, pixels: Pixels, dtype: torch.dtype) -> torch.Tensor:
    if not pixels.grids:
        return torch.zeros((0, 0), dtype=dtype)
    values, grids = torch.tensor(pixels.values.astype(np.float64)).to(dtype), torch.tensor(pixels.grids)
    found = model.model.visual(values, grid_thw=grids, return_dict=True)
    return torch.cat([found.pooler_output, *(getattr(found, "deepstack_features", None) or [])], dim=-1)


def _qwen_positions(model: Any, inputs: dict[str, Any]) -> tuple[np.ndarray, int]:
    known = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    if "mm_token_type_ids" not in inputs:
        return np.zeros((0, 0)), 0
    axes, delta = model.model.get_rope_index(**{name: inputs[name] for name in known if name in inputs})
    return axes[:, 0].numpy(), int(delta)


_PLANS = {
    "text": Plan(),
    "one": Plan(((40, 56),)),
    "several": Plan(((24, 24), (61, 83), (9, 70))),
    "clip": Plan(clip=(5, 24, 32, 4.0)),
}
_SIZE = {"size": {"shortest_edge": 256, "longest_edge": 4096}}
_QWEN2 = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, **_SIZE}
_QWEN3 = {**_QWEN2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
_DEEP = {
    **_TOWER,
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "intermediate_size": 40,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
_CONTIGUOUS = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_INTERLEAVED = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 10000.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"],
}


def _qwen(
    name: str, architecture: str, vision: dict[str, Any], text: dict[str, Any], settings: dict[str, Any], **others: Any
) -> ImageCase:
    config = {"architectures": [architecture], "model_type": name, **_TOKENS, "vision_config": vision, **text}
    files = {"config.json": config, "preprocessor_config.json": settings, "video_preprocessor_config.json": _SIZE}
    ways = (_qwen_pixels, _qwen_prompt, _qwen_rows, _qwen_inputs, _qwen_positions)
    return ImageCase(name, files, _PLANS, *ways, **others)


def _nested(kind: str, **fields: Any) -> dict[str, Any]:
    return {"text_config": {**_TEXT, "model_type": kind, **fields}}


CASES = (
    _qwen(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        {**_TOWER, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        _nested("qwen2_vl_text", rope_parameters=_CONTIGUOUS),
        _QWEN2,
    ),
    _qwen(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {
            **_TOWER,
            "depth": 4,
            "hidden_size": 32,
            "out_hidden_size": 32,
            "intermediate_size": 40,
            "window_size": 16,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 3,
        },
        # as on the hub: fields of the text model are next to those of the tower
        {**_TEXT, "rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        _QWEN2,
    ),
    _qwen(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        _DEEP,
        _nested("qwen3_vl_text", head_dim=16, num_hidden_layers=3, rope_parameters=_INTERLEAVED),
        _QWEN3,
    ),
    _qwen(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        _DEEP,
        _nested("qwen3_vl_moe_text", head_dim=16, rope_parameters=_INTERLEAVED, **_EXPERTS),
        _QWEN3,
    ),
    _qwen(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        {name: value for name, value in _DEEP.items() if name != "deepstack_visual_indexes"},
        _nested(
            "qwen3_5_text",
            head_dim=32,
            rope_parameters={**_INTERLEAVED, "partial_rotary_factor": 0.5},
            **_LINEAR,
        ),
        _QWEN3,
        norm_centre=0.0,
        seed=2,
    ),
)


# ---- pictures

BOUNDS = ((56 * 56, 28 * 28 * 1280), (65536, 16777216), (4 * 28 * 28, 12 * 28 * 28))
"""Fewest and most pixels by which the test pictures are resized."""


def picture_digests() -> dict[str, dict]:
    """Return grids and SHA-256 of the pixels of all pictures, or the reason why there are none."""
    shown: dict[str, Callable[..., Any]]
    shown = {name: lambda data=data: load_image(_as_url(data())) for name, data in FILES.items()}
    shown |= {f"handed {mode}": made for mode, made in HANDED.items()}
    found: dict[str, dict] = {}
    for index, (least, most) in enumerate(BOUNDS):
        patch = 16 if index == 1 else 14
        process = Qwen2VLImageProcessorPil(patch_size=patch, size={"shortest_edge": least, "longest_edge": most})
        found[f"{patch} {least} {most}"] = {name: _pixel_digest(process, made()) for name, made in shown.items()}
    return found


def _pixel_digest(process: Any, image: PIL.Image.Image) -> list:
    made = process(images=[image], return_tensors="np")
    return [made["image_grid_thw"][0].tolist(), hashlib.sha256(made["pixel_values"].tobytes()).hexdigest()]


def _as_url(data: bytes) -> str:
    import base64

    return base64.encodebytes(data).decode()


def main(arguments: Sequence[str] | None = None, cases: Sequence[ImageCase] = CASES) -> int:
    """Run one command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("make", "check", "pictures"))
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--seed", type=int, help="seed of the weights, and the first that is tried for prompts")
    options = parser.parse_args(arguments)
    if options.command == "pictures":
        write_json(options.path, picture_digests())
        return 0
    wrong = []
    for case in cases:
        if options.case and case.name not in options.case:
            continue
        golden = make(case if options.seed is None else dataclasses.replace(case, seed=options.seed))
        if options.command == "make":
            golden.save(options.path)
            for name, scene in golden.scenes.items():
                errors = scene.rows_error, scene.prefill_error, float(scene.decode_error.max())
                print(case.name, name, len(scene.prompt), "tokens, margin", round(scene.margin, 4), "errors", *errors)
        else:
            wrong += differences(golden, read_images(options.path / case.name))
    print("\n".join(wrong) or "all as recorded")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
