"""Logits of a given saved adapter by PEFT, in float32.

python -m tools.oracle.saved_adapter BASE ADAPTER TOKENS OUT.npy     TOKENS: a list of ids as JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np
import peft
import torch
import transformers


def main(arguments: Sequence[str]) -> int:
    """Write logits [time, vocabulary]."""
    base, adapter, tokens, out = arguments
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        np.save(out, model(input_ids=torch.tensor([json.loads(tokens)])).logits[0].numpy())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
