"""Golden adapters: PEFT's files and logits, as the tests read them. Needs numpy and safetensors only.

The model's weights are not stored (`tools.oracle.golden.make_tensors`), unless they are quantised: then the file of
bitsandbytes is next to the adapter. The adapter is the folder that PEFT saved.
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
    """Golden logits of one adapter.

    Attributes:
        name: name of the case, and of its folder.
        config: config.json of the model; with a quantization_config where its weights are stored.
        seed, norm_centre, shapes, weights_sha256: derivation and digest of its weights.
        tokens: T ids.
        logits: [T, V] float64, with the adapter.
        error: max abs difference of PEFT's float32 logits to ``logits``.
        effect: max abs difference of the base model's logits to ``logits``.
        versions: versions of torch, transformers, PEFT and numpy that made this.
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
        """Write the golden files next to the adapter's own files."""
        write_json(folder / "config.json", self.config)
        write_json(folder / "case.json", {key: getattr(self, key) for key in _KEYS})
        np.savez_compressed(folder / "logits.npz", logits=self.logits)


def load_adapter_golden(folder: pathlib.Path) -> AdapterGolden:
    """Read one case's folder."""
    case = json.loads((folder / "case.json").read_text())
    case["shapes"] = {name: tuple(shape) for name, shape in case["shapes"].items()}
    with np.load(folder / "logits.npz", allow_pickle=False) as arrays:
        logits = arrays["logits"]
    return AdapterGolden(
        name=folder.name, config=json.loads((folder / "config.json").read_text()), logits=logits, **case
    )


def write_base(golden: AdapterGolden, folder: pathlib.Path, goldens: pathlib.Path | None = None) -> pathlib.Path:
    """Write the adapter's model as a Hugging Face folder; return it.

    Args:
        goldens: the folder of all cases, which has the weights of quantised models.

    Raises:
        ValueError: the weights differ from the oracle's.
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
