"""Logits of a tiny vision-language model with an adapter made by PEFT, for a text, in float32.

python -m tools.oracle.wrapped_adapter FOLDER LORA TOKENS     LORA: arguments of LoraConfig, TOKENS: ids, both as JSON

FOLDER gets the model (``base``), the adapter that PEFT saves (``adapter``), and ``logits.npy``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np
import peft
import torch
import transformers

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "patch_size": 4,
    "fullatt_block_indexes": [0],
    "window_size": 8,
}
TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def main(arguments: Sequence[str]) -> int:
    """Write the folder."""
    folder, lora, tokens = arguments
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, **TOKENS)
    base = transformers.Qwen2_5_VLForConditionalGeneration(config).float()
    base.save_pretrained(f"{folder}/base")
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **json.loads(lora))).eval()
    with torch.no_grad():
        for values in model.parameters():
            if values.requires_grad:
                values.copy_(0.3 * torch.randn_like(values))
        logits = model(input_ids=torch.tensor([json.loads(tokens)])).logits[0]
    model.save_pretrained(f"{folder}/adapter")
    np.save(f"{folder}/logits.npy", logits.numpy())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
