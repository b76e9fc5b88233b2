"""Checkpoints of golden files as llama.cpp's converter takes them, and its output for each (`gguf_golden`)."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tools.oracle.golden import load, make_tensors

# llama.cpp assumes values that a GGUF file cannot express: configs are changed to these.
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_TIED = {"tie_word_embeddings": True}

CASES: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss-hub": {},
    "gpt_oss-without-bias": {},
    "llama4_text-hub": {
        "rope_scaling": {**_LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
    },
    "granite-hub": {},
    "granite-biases": {},
    "ministral3-hub": {},
    "olmo2-hub": {},
    "olmo3-yarn-hub": {},
    "smollm3-hub": {"no_rope_layers": None},
    "phi-hub": {},
    "cohere-hub": _TIED,
    "cohere-biases": _TIED,
    "cohere2-hub": {**_TIED, "rotary_pct": 1.0, "sliding_window_pattern": 4},
    "exaone4-hub": {"rope_scaling": {**_LLAMA3, "factor": 16.0, "original_max_position_embeddings": 8192}},
    "exaone4-full": {},
    "glm-hub": {"rms_norm_eps": 1e-5, "max_position_embeddings": 64},
    "glm4-hub": {},
    "ernie4_5-hub": {},
    "ernie4_5_moe-hub": {},
    "ernie4_5_moe-between-dense-layers": {"moe_norm_min": 1e-12},
    "hunyuan_v1_dense-biases": {},
    "gpt_neox-hub": {"hidden_act": "gelu", "rotary_emb_base": 10000},
    "starcoder2-hub": {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
    "starcoder2-plain": {"hidden_act": "gelu_pytorch_tanh"},
    "stablelm-hub": {},
    "seed_oss-biases": {},
    "glm4_moe-hub": {},
    "olmoe-hub": {},
    "phimoe-hub": {"rope_scaling": {"short_mscale": 1.0, "long_mscale": 1.0}, "router_jitter_noise": 0.01},
    "minimax_m2-hub": {},
    "glm4_moe_lite-hub": {},
    "youtu-hub": {},
}

_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.2},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# Gemma 3n and 4: the converter requires the size of wide heads, which newer files of transformers leave out.
PER_LAYER: Mapping[str, Mapping[str, Any]] = {
    "gemma4_text-effective-hub": {},
    "gemma4_text-embedded-untied": {"global_head_dim": 16},
    "gemma4_text-experts": {},
    "gemma4_text-pattern-hub": {"rope_parameters": _ROPES},
    "gemma3n_text-hub": {},
    "gemma3n_text-default-pattern-hub": {},
}


@dataclasses.dataclass(frozen=True)
class Converted:
    """A checkpoint, and llama.cpp's file of it.

    Attributes:
        config: config.json.
        seed, shapes: derivation of its tensors: see `make_tensors`.
        metadata: keys and values of the file, without those of tokenizers and of the file itself.
        tensors: tensors of the file: kind, shape as [out, in] and the beginning of the SHA-256 of the bytes.
    """

    name: str
    config: dict[str, Any]
    seed: int
    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, Any]
    tensors: dict[str, tuple[str, list[int], str]]

    def checkpoint(self) -> dict[str, np.ndarray]:
        return make_tensors(self.seed, self.shapes)


def checkpoint_of(goldens: pathlib.Path, name: str) -> Converted:
    """Return the checkpoint of a case, without metadata and tensors of a file."""
    golden, changes = load(goldens / name), dict({**CASES, **PER_LAYER}[name])
    inner = {key: {**golden.config.get(key, {}), **value} for key, value in changes.items() if isinstance(value, dict)}
    config = {**golden.config, **changes, **inner}
    kept = {key: value for key, value in config.items() if value is not None or key not in changes}
    if "sliding_window" in changes:
        kept["sliding_window"] = changes["sliding_window"]  # null is different from a missing field
    tied = kept.get("tie_word_embeddings", False)
    shapes = {key: shape for key, shape in golden.shapes.items() if not (tied and key == "lm_head.weight")}
    return Converted(name, kept, golden.seed, shapes, {}, {})


def read_converted(path: pathlib.Path) -> Converted:
    content = json.loads(path.read_text(encoding="utf-8"))
    shapes = {name: tuple(shape) for name, shape in content.pop("shapes").items()}
    return Converted(name=path.stem, shapes=shapes, **content)
