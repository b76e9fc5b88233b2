"""Oracle of tied heads: whether transformers ties the head of a wrapped text model, by both models' flags.

``python -m tools.oracle.wrapper_ties`` writes tests/goldens/wrapper_ties.json: for each architecture a list of
(the wrapper's flag, the text model's, whether the head is tied); null is a missing flag.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import Any

import torch
import transformers

from tools.oracle.run import read_config

GOLDEN = pathlib.Path("tests/goldens/wrapper_ties.json")
WRAPPERS = {
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3_text"),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4_text"),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", "gemma4_unified_text"),
    "Idefics3ForConditionalGeneration": ("idefics3", "llama"),
    "Kimi_K25ForConditionalGeneration": ("kimi_k25", "deepseek_v3"),
    "Llama4ForConditionalGeneration": ("llama4", "llama4_text"),
    "LlavaForConditionalGeneration": ("llava", "llama"),
    "Mistral3ForConditionalGeneration": ("mistral3", "mistral"),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", "qwen2_vl_text"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "qwen2_5_vl_text"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "qwen3_vl_moe_text"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen3_5_moe_text"),
    "SmolVLMForConditionalGeneration": ("smolvlm", "llama"),
}
"""Model type of each wrapper, and of its text model; Gemma 3n's needs a package that the oracle lacks."""
_SIZES = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_FLAGS = (None, True, False)


def is_tied(architecture: str, outer: bool | None, inner: bool | None) -> bool:
    kind, text = WRAPPERS[architecture]
    fields: dict[str, Any] = {"architectures": [architecture], "model_type": kind}
    own: dict[str, Any] = {"model_type": text, **_SIZES, **_HEADS}
    for place, flag in ((fields, outer), (own, inner)):
        place |= {} if flag is None else {"tie_word_embeddings": flag}
    config = read_config({**fields, "text_config": own})
    for name in ("num_hidden_layers", "depth"):
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, 1)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    return any("lm_head" in name for name in model.all_tied_weights_keys)


def rows() -> list[dict[str, Any]]:
    """Return the contents of the golden file."""
    return [
        {
            "architecture": name,
            "text": WRAPPERS[name][1],
            "tied": [[outer, inner, is_tied(name, outer, inner)] for outer, inner in itertools.product(_FLAGS, _FLAGS)],
        }
        for name in WRAPPERS
    ]


if __name__ == "__main__":
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows()) + "\n]\n")
