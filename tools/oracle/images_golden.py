"""Golden records of models with images, written by `tools.oracle.images`, read by tests. Needs numpy and safetensors.

golden = read_images(pathlib.Path("tests/goldens/images/qwen2_vl"))
folder = write_image_checkpoint(golden, tmp_path)  # config.json, settings of the processor, model.safetensors
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tools.oracle.golden import Shapes, digest, make_tensors, uniform, write_json

SLACK = 1e-6
_TOWER = re.compile(r"\b(visual|vision_tower|vision_model|multi_modal_projector|connector)\.")
_TABLE = re.compile(r"(pos_embed|position_embedding)\.weight$|class_embedding$")
_ARRAYS = ("pixels", "rows", "axes", "prefill", "decode", "decode_error")
_RECORD = ("prompt", "pictures", "clip", "grids", "greedy", "delta", "rows_error", "prefill_error", "margin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """A prompt with images, and what transformers computes of it. Sizes: T tokens, N decode steps, V vocabulary.

    Attributes:
        prompt: T token ids, expanded.
        pictures: height, width and seed of each picture (`tools.oracle.pictures`).
        clip: frames' number, height, width and seed, and their rate; None: the scene has pictures.
        grids: grid of each image.
        greedy: N + 1 ids, as in `tools.oracle.golden.Golden`.
        delta: what is added to the positions of decode steps.
        pixels: [rows, values] float32 normalised patches of all images.
        rows: [tokens, width] outputs of the tower, float32 copies of float64.
        axes: [3, T] rotary positions; [0, 0]: those of text.
        prefill, decode: [T, V] and [N, V] logits, float32 copies of float64.
        rows_error, prefill_error, decode_error: max abs differences to transformers in float32; the last one [N].
        margin: the smallest difference of the two largest logits.
    """

    prompt: list[int]
    pictures: list[list[int]]
    clip: list[float] | None
    grids: list[list[int]]
    greedy: list[int]
    delta: int
    pixels: np.ndarray
    rows: np.ndarray
    axes: np.ndarray
    prefill: np.ndarray
    decode: np.ndarray
    rows_error: float
    prefill_error: float
    decode_error: np.ndarray
    margin: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageGolden:
    """Golden record of one tiny model with images.

    Attributes:
        files: JSON files of the checkpoint by name, config.json among them.
        shapes: checkpoint tensors, as transformers names them.
        weights_sha256: ``digest`` of the weights.
        scenes: by name.
        versions: versions of torch, transformers, numpy and Pillow that made this.
        norm_centre: see `tools.oracle.golden.make_tensors`; of the text model's norms.
    """

    name: str
    files: dict[str, dict]
    seed: int
    shapes: dict[str, tuple[int, ...]]
    weights_sha256: str
    scenes: dict[str, Scene]
    versions: dict[str, str]
    norm_centre: float = 1.0

    def tensors(self) -> dict[str, np.ndarray]:
        """Derive the checkpoint's weights again.

        Raises:
            ValueError: they differ from the oracle's.
        """
        tensors = image_tensors(self.seed, self.shapes, self.norm_centre)
        if digest(tensors) != self.weights_sha256:
            raise ValueError(f"{self.name}: the weights derived from seed {self.seed} are not those of the oracle")
        return tensors

    def save(self, root: pathlib.Path) -> None:
        """Write ``root/name/{config.json,...,case.json,arrays.npz}``."""
        folder = root / self.name
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_json(folder / name, content)
        scenes = {name: {key: getattr(scene, key) for key in _RECORD} for name, scene in self.scenes.items()}
        kept = ("seed", "norm_centre", "weights_sha256", "versions")
        case = {key: getattr(self, key) for key in kept} | {f"scene {name}": scene for name, scene in scenes.items()}
        write_json(folder / "case.json", case | {"shapes": self.shapes})
        arrays = {f"{name}:{key}": getattr(scene, key) for name, scene in self.scenes.items() for key in _ARRAYS}
        np.savez_compressed(folder / "arrays.npz", **arrays)


def image_tensors(seed: int, shapes: Shapes, norm_centre: float = 1.0) -> dict[str, np.ndarray]:
    """Return all tensors of a checkpoint, float32: those of towers keep unit variance, as those of text models do."""
    text = {name: shape for name, shape in shapes.items() if not _TOWER.search(name)}
    made = make_tensors(seed, text, norm_centre)
    for name, shape in shapes.items():
        if name not in made:
            centre, width = _tower_spread(name, tuple(shape))
            made[name] = np.asarray(np.float32(centre) + np.float32(width) * uniform(seed, name, tuple(shape)))
    return made


def _tower_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if _TABLE.search(name):
        return 0.0, 1.0
    if len(shape) == 1:
        return (1.0, 0.4) if name.endswith(".weight") else (0.0, 0.3)
    return 0.0, (3.0 / float(np.prod(shape[1:]))) ** 0.5


def read_images(folder: pathlib.Path) -> ImageGolden:
    """Read one case's folder."""
    case = json.loads((folder / "case.json").read_text())
    names = [key.removeprefix("scene ") for key in case if key.startswith("scene ")]
    with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
        scenes = {
            name: Scene(**case.pop(f"scene {name}"), **{key: arrays[f"{name}:{key}"] for key in _ARRAYS})
            for name in names
        }
    case["shapes"] = {name: tuple(shape) for name, shape in case["shapes"].items()}
    files = {path.name: json.loads(path.read_text()) for path in folder.glob("*config.json")}
    return ImageGolden(name=folder.name, files=files, scenes=scenes, **case)


def write_image_checkpoint(golden: ImageGolden, folder: pathlib.Path) -> pathlib.Path:
    """Write the case as a Hugging Face folder; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in golden.files.items():
        (folder / name).write_text(json.dumps(content))
    save_file(golden.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def allowed(error: Any, largest: Any = 1.0) -> Any:
    """Return the largest allowed difference where transformers' own float32 error is ``error``: twice that, and 1e-6 of
    the largest number."""
    return 2.0 * np.asarray(error) + SLACK * np.maximum(1.0, largest)


def unseen(files: Mapping[str, Mapping[str, Any]]) -> dict[str, dict]:
    """Return the files of a checkpoint other than its config.json."""
    return {name: dict(content) for name, content in files.items() if name != "config.json"}
