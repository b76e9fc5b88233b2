"""Golden records of draft heads, written by `tools.oracle.heads`, read by tests. Needs numpy and safetensors.

golden = read_head(pathlib.Path("tests/goldens/heads/eagle3-original"))
folder = write_head_checkpoint(tmp_path, golden)  # config.json and model.safetensors, as the head is published
faults = golden.faults(hidden=..., logits=..., chain_hidden=..., chain_logits=...)  # [] if all are within limits
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tools.oracle.golden import digest, make_tensors, write_json

ANSWERS = ("hidden", "logits", "chain_hidden", "chain_logits")
TREE = ("draft_tokens", "retrieve_indices", "tree_mask", "tree_position_ids")
_GIVEN = ("features", "tokens", "chain_tokens")
_CASE_KEYS = ("method", "original", "seed", "weights_sha256", "versions", "tree", "integers", "copies", "target_shapes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadGolden:
    """Golden outputs of one tiny head. Sizes: T pairs, F width of a feature, H of the head, V of its vocabulary.

    Pair i is the target's feature at position i with the token at position i + 1. The chain continues from the last
    pair: step k is fed the previous hidden state and ``chain_tokens[k]``, at position T + k.

    Attributes:
        name: name of the case, and of its folder.
        method: "eagle3", "eagle", "medusa" or "mtp".
        config: config.json as a dict, with the field names of the head's format. For "mtp" it is the target's.
        original: the implementation, and its classes, that computed the outputs.
        seed: seed of weights, features and tokens.
        shapes: float32 checkpoint tensors, as the format names them.
        integers: checkpoint tensors that are not weights, by name: their ``dtype`` and ``values``.
        copies: tensors in ``shapes`` that are duplicates of another: name -> name.
        target_shapes: tensors that the head shares with its target, under the target's names.
        weights_sha256: ``digest`` of all of these.
        features: [T, F], float64 with values that float32 represents exactly.
        tokens: [T] target ids.
        chain_tokens: [4] target ids; empty for "medusa".
        answers: float64, by name: ``hidden`` [T, H], the state fed back; ``logits`` [T, V]; ``chain_hidden`` [4, H];
            ``chain_logits`` [4, V]. "medusa" has only ``logits`` [heads, T, V].
        error: for each answer the max abs error of the original in float32: one for a first pass, one a chain step.
        tree: None, or {"total_tokens", "depth", "top_k"}, the settings of EAGLE-2's dynamic tree after the T pairs.
        tree_answers: the tree's ``draft_tokens`` [N], ``retrieve_indices`` [leaves, longest path] (-1: no node),
            ``tree_mask`` [N, N] and ``tree_position_ids`` [N]; node 0 is the last of ``tokens``. Empty without a tree.
        versions: versions of torch, transformers and numpy that made this.
    """

    name: str
    method: str
    config: dict
    original: str
    seed: int
    shapes: dict[str, tuple[int, ...]]
    integers: dict[str, dict[str, Any]]
    copies: dict[str, str]
    target_shapes: dict[str, tuple[int, ...]]
    weights_sha256: str
    features: np.ndarray
    tokens: np.ndarray
    chain_tokens: np.ndarray
    answers: dict[str, np.ndarray]
    error: dict[str, np.ndarray]
    tree: dict[str, int] | None
    tree_answers: dict[str, np.ndarray]
    versions: dict[str, str]

    def tensors(self) -> dict[str, np.ndarray]:
        """Derive the head's checkpoint again.

        Raises:
            ValueError: it, or the borrowed tensors of the target, differ from the oracle's.
        """
        tensors = derive(self.seed, self.shapes, self.integers, self.copies)
        if digest(tensors | self.target_tensors()) != self.weights_sha256:
            raise ValueError(f"{self.name}: the weights derived from seed {self.seed} are not those of the oracle")
        return tensors

    def target_tensors(self) -> dict[str, np.ndarray]:
        """Return the borrowed tensors: ``model.embed_tokens.weight``, ``lm_head.weight``, both or none."""
        return make_tensors(self.seed, self.target_shapes)

    def limit(self, answer: str) -> np.ndarray:
        """Return the largest error allowed: twice the original's in float32, and 1e-6 of the largest number, which
        differences in the order of summation do not reach on any processor (docs/oracle.md)."""
        return 2.0 * self.error[answer] + 1e-6 * max(1.0, float(np.abs(self.answers[answer]).max()))

    def faults(self, **ours: np.ndarray) -> list[str]:
        """Return a line for each of ``ours`` (arrays by the names of ``answers``) that is not within its limit."""
        return [line for answer, array in ours.items() for line in self._faults(answer, np.asarray(array, np.float64))]

    def _faults(self, answer: str, ours: np.ndarray) -> list[str]:
        expected, limit = self.answers[answer], self.limit(answer)
        if ours.shape != expected.shape:
            return [f"{self.name}: {answer} has shape {ours.shape}, not {expected.shape}"]
        off = deviation(answer, ours, expected)
        if np.all(off <= limit):  # False for nan
            return []
        return [f"{self.name}: {answer} is off by {np.max(off):.2e}, {np.max(off / limit):.1f} times what is allowed"]

    def save(self, root: pathlib.Path) -> None:
        """Write ``root/name/{config.json,case.json,answers.npz}``."""
        folder = root / self.name
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", self.config)
        case = {key: getattr(self, key) for key in _CASE_KEYS}
        write_json(folder / "case.json", {key: value for key, value in case.items() if value} | {"shapes": self.shapes})
        arrays = {key: getattr(self, key) for key in _GIVEN} | self.answers | self.tree_answers
        arrays |= {f"{key}_error": value for key, value in self.error.items()}
        np.savez_compressed(folder / "answers.npz", **arrays)


def derive(
    seed: int,
    shapes: Mapping[str, tuple[int, ...]],
    integers: Mapping[str, Mapping[str, Any]],
    copies: Mapping[str, str],
) -> dict[str, np.ndarray]:
    """Return all tensors of a head's checkpoint."""
    tensors = make_tensors(seed, shapes)
    tensors |= {name: tensors[other].copy() for name, other in copies.items()}
    return tensors | {name: np.array(given["values"], given["dtype"]) for name, given in integers.items()}


def deviation(answer: str, ours: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the largest absolute difference: a scalar for a first pass, one a step for a chain."""
    off = np.abs(ours - expected)
    return off.max(-1) if answer.startswith("chain_") else off.max()


def read_head(folder: pathlib.Path) -> HeadGolden:
    """Read one case's folder."""
    case: dict[str, Any] = {"tree": None, "integers": {}, "copies": {}, "target_shapes": {}}
    case |= json.loads((folder / "case.json").read_text())
    for shapes in ("shapes", "target_shapes"):
        case[shapes] = {name: tuple(shape) for name, shape in case[shapes].items()}
    with np.load(folder / "answers.npz", allow_pickle=False) as arrays:
        held = dict(arrays)
    answers = {key: held[key] for key in ANSWERS if key in held}
    return HeadGolden(
        name=folder.name,
        config=json.loads((folder / "config.json").read_text()),
        answers=answers,
        error={key: held[f"{key}_error"] for key in answers},
        tree_answers={key: held[key] for key in TREE if key in held},
        **{key: held[key] for key in _GIVEN},
        **case,
    )


def write_head_checkpoint(folder: pathlib.Path, golden: HeadGolden) -> pathlib.Path:
    """Write the head as it is published, config.json and one safetensors file, and return ``folder``.

    A folder of "mtp" contains target and head. Borrowed tensors are not written: see ``target_tensors``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden.config, indent=2))
    file = "medusa_lm_head.safetensors" if golden.method == "medusa" else "model.safetensors"
    save_file(golden.tensors(), folder / file, metadata={"format": "pt"})
    return folder
