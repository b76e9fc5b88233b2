"""Writes ``tests/goldens/ggml_blocks.npz``: random blocks of each kind, and what llama.cpp's own package makes of them.

Needs numpy and the package ``gguf`` (0.19.0 made the committed file):

    python -m tools.oracle.ggml_blocks tests/goldens/ggml_blocks.npz
"""

from __future__ import annotations

import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

BLOCKS = 12

# Where a block of the kind holds its float16 numbers: random bytes would make infinities of them.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
}


def random_blocks(rng: np.random.Generator, kind: str, size: int) -> np.ndarray:
    """uint8 [BLOCKS, size] whose scales are numbers, a subnormal float16 among them."""
    blocks = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = (rng.standard_normal(BLOCKS) * 10.0 ** rng.integers(-6, 2, BLOCKS)).astype("<f2")
        scales[0] = np.float16(6e-8)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(BLOCKS, 2)
    if kind == "MXFP4":
        blocks[:, 0] = [4, 5, 60, 90, 100, 120, 126, 127, 128, 140, 200, 250]
    if kind == "NVFP4":
        blocks[:, :4] = rng.permutation(128)[: 4 * BLOCKS].reshape(BLOCKS, 4)
        blocks[0, :4] = [0, 0x7F, 1, 7]
    return blocks


def main(path: str) -> None:
    rng = np.random.default_rng(7)
    arrays = {}
    for kind in HALVES:
        number = GGMLQuantizationType[kind]
        elements, size = GGML_QUANT_SIZES[number]
        blocks = random_blocks(rng, kind, size)
        arrays[f"{kind}:blocks"] = blocks
        arrays[f"{kind}:values"] = dequantize(blocks, number).astype(np.float32).reshape(BLOCKS, elements)
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
