"""Golden adapters: what PEFT wrote and answered, as the tests read it. Needs numpy and safetensors only.

The model's weights are not stored (`tools.oracle.golden.make_tensors`), unless they are quantised: those lie as
bitsandbytes has written them beside the adapter. The adapter is the folder that PEFT saved.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import save_file

from tools.oracle.golden import digest, make_tensors, write_json

STORED_FILE = "base.safetensors"
_KEYS = ("seed", "norm_centre", "weights_sha256", "tokens", "error", "effect", "versions", "shapes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterGolden:
    """One adapter's answers.

    Attributes:
        name: of the case, and of its folder.
        config: of the model; with a quantization_config where its weights are stored.
        seed, norm_centre, shapes, weights_sha256: of its weights.
        tokens: T ids.
        logits: [T, V] float64, with the adapter.
        error: max abs difference of PEFT's float32 logits to them.
        effect: max abs difference of the model's own logits to them.
        versions: of torch, transformers, PEFT and numpy that made this.
    """

    name: str
    config: dict
    seed: int
    norm_centre: float
    shapes: dict[str, tuple[int, ...]]
    weights_sha256: str
    tokens: list[int]
    logits: np.ndarray
    error: float
    effect: float
    versions: dict[str, str]

    def save(self, folder: pathlib.Path) -> None:
        """Writes what is beside the adapter's own files."""
        write_json(folder / "config.json", self.config)
        write_json(folder / "case.json", {key: getattr(self, key) for key in _KEYS})
        np.savez_compressed(folder / "logits.npz", logits=self.logits)


def load_adapter_golden(folder: pathlib.Path) -> AdapterGolden:
    """Reads one case's folder."""
    case = json.loads((folder / "case.json").read_text())
    case["shapes"] = {name: tuple(shape) for name, shape in case["shapes"].items()}
    with np.load(folder / "logits.npz", allow_pickle=False) as arrays:
        logits = arrays["logits"]
    return AdapterGolden(
        name=folder.name, config=json.loads((folder / "config.json").read_text()), logits=logits, **case
    )


def write_base(golden: AdapterGolden, folder: pathlib.Path, goldens: pathlib.Path | None = None) -> pathlib.Path:
    """Writes the adapter's model as a Hugging Face folder; returns it.

    Args:
        goldens: the folder of all cases, which has the weights of those that are quantised.

    Raises:
        ValueError: the weights differ from those that the oracle used.
    """
    tensors = make_tensors(golden.seed, golden.shapes, golden.norm_centre)
    if digest(tensors) != golden.weights_sha256:
        raise ValueError(f"{golden.name}: the weights derived from seed {golden.seed} are not those of the oracle")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden.config, indent=2))
    if "quantization_config" in golden.config:
        assert goldens is not None
        shutil.copy(goldens / golden.name / STORED_FILE, folder / "model.safetensors")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
