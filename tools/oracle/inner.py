"""Oracle of intermediate values in transformers: hidden states and attention weights of some golden cases, in float64.

.venv-oracle/bin/python -m tools.oracle.inner tests/goldens/inner

It writes a file for each case, which shares weights and prompt with the case in ``tests/goldens/models``.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import torch

from tools.oracle.golden import Golden, load
from tools.oracle.run import AllDouble, build, read_checkpoint

CASES = (
    "llama-tiny-hub",
    "gpt2-hub",
    "gpt_oss-hub",  # sinks, windows, experts
    "gemma2-score-cap",
    "gemma3n_text-hub",  # AltUp streams, shared KV layers
    "deepseek_v3-hub",  # latent attention (MLA)
    "mixtral-window-passed-in-decode-head20",
    "lfm2-hub",
    "qwen3_next-hub",
)
TOKENS = 20


def main(out: str) -> None:
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        golden = load(pathlib.Path("tests/goldens/models") / name)
        arrays = ask(golden)
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        print(name, {key: array.shape for key, array in arrays.items()}, flush=True)


@torch.no_grad()
def ask(golden: Golden) -> dict[str, np.ndarray]:
    """Return float32 copies of float64 results for the first tokens of the prompt.

    ``tokens`` [T]; ``hidden`` [layers + 1, *streams, T, d], whose last entry is after the final norm where
    transformers returns it so; ``maps`` [attention layers, heads, T, T].
    """
    model = build(golden.config, torch.float64)
    model.load_state_dict(read_checkpoint(golden.config, golden.tensors()))
    tokens = golden.prompt[:TOKENS]
    torch.set_default_dtype(torch.float64)
    try:
        with AllDouble():
            out = model(torch.tensor([tokens]), output_hidden_states=True, output_attentions=True, use_cache=False)
    finally:
        torch.set_default_dtype(torch.float32)
    maps = [each[0] for each in out.attentions if each is not None]
    answers = {"hidden": [each.squeeze(-3) for each in out.hidden_states], "maps": maps}
    return {"tokens": np.asarray(tokens)} | {
        name: torch.stack(each).numpy().astype(np.float32) for name, each in answers.items()
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
