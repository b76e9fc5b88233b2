"""A random Llama of 125M parameters as a Hugging Face folder: ``python -m benchmarks.peers.random_model FOLDER``."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.registry import family_for
from jaxinfer.weights import init_params, save_params

LLAMA_125M: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(folder: pathlib.Path, config: Mapping[str, Any] = LLAMA_125M) -> None:
    """Write float32 weights and a tokenizer that maps numbers to ids. config.json is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(_numbers(config["vocab_size"])), encoding="utf-8")
    family = family_for(config)
    specs = family.param_specs(family.config(config))
    save_params(folder, init_params(specs, seed=0), specs, config)


def _numbers(size: int) -> dict[str, Any]:
    vocabulary = {str(token): token for token in range(size)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"},
    }


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
