"""Generator of ``tests/goldens/ggml_blocks.npz``: random blocks of each kind, dequantised by llama.cpp.

Needs numpy, the package ``gguf`` and llama.cpp's library ``libggml-base``, which the package ``llama-cpp-python`` has
in its folder ``lib`` (0.19.0 and 0.3.36 made the committed file; benchmarks/peers/requirements.txt has both):

    python -m tools.oracle.ggml_blocks tests/goldens/ggml_blocks.npz .../llama_cpp/lib/libggml-base.so

For each kind that both support, both must agree.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

BLOCKS = 12

# Offsets of the float16 numbers in a block of the kind: random bytes would make infinities of them.
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
    "Q1_0": (0,),
    "Q2_0": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),
}

UNKNOWN_TO_THE_PACKAGE = {"Q1_0": (128, 18), "Q2_0": (64, 18)}
# From this kind on, scales include 0 and the largest ones.
WITH_EXTREMES = tuple(HALVES)[tuple(HALVES).index("Q1_0") :]
EXTREMES = np.array([6e-8, 0.0, -0.0, 65504.0, -(2.0**-14), -6e-8], "<f2")

# Entries of the codebook, and the number of entries per block.
ENTRIES = {
    "IQ2_XXS": (256, 32),
    "IQ2_XS": (512, 32),
    "IQ2_S": (1024, 32),
    "IQ3_XXS": (256, 64),
    "IQ3_S": (512, 64),
    "IQ1_S": (2048, 32),
    "IQ1_M": (2048, 32),
}


def random_blocks(rng: np.random.Generator, kind: str, size: int) -> np.ndarray:
    """Return uint8 [BLOCKS, size] with finite scales, a subnormal float16 among them."""
    blocks = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = scales_of(rng, kind).view(np.uint8).reshape(BLOCKS, 2)
    if kind == "IQ1_M":
        blocks = with_quartered_scales(blocks, scales_of(rng, kind))
    if kind == "MXFP4":
        blocks[:, 0] = [4, 5, 60, 90, 100, 120, 126, 127, 128, 140, 200, 250]
    if kind == "NVFP4":
        blocks[:, :4] = rng.permutation(128)[: 4 * BLOCKS].reshape(BLOCKS, 4)
        blocks[0, :4] = [0, 0x7F, 1, 7]
    return blocks


def scales_of(rng: np.random.Generator, kind: str) -> np.ndarray:
    scales = (rng.standard_normal(BLOCKS) * 10.0 ** rng.integers(-6, 2, BLOCKS)).astype("<f2")
    scales[0] = np.float16(6e-8)
    if kind in WITH_EXTREMES:
        scales[: len(EXTREMES)] = EXTREMES
    return scales


def with_quartered_scales(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Store scales as IQ1_M does: four bits of a float16 in the highest ones of each of a block's last four words."""
    words = np.ascontiguousarray(blocks[:, 48:]).view("<u2") & 0x0FFF
    quarters = (scales.view("<u2")[:, None] >> np.arange(0, 16, 4, dtype="<u2")) << 12
    return np.concatenate([blocks[:, :48], (words | quarters).astype("<u2").view(np.uint8)], axis=1)


def blocks_of_all_entries(kind: str, size: int) -> np.ndarray:
    """Return uint8 [n, size]: each entry of the codebook once, in order, with scales of 1, all sign patterns."""
    entries, each = ENTRIES[kind]
    count = entries // each
    index = np.arange(entries).reshape(count, each)
    low, high = (index & 255).astype(np.uint8), index >> 8
    signs = (np.arange(count * 32) % (128 if kind in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS") else 256)).reshape(count, 32)
    one = np.broadcast_to(np.array([1.0], "<f2").view(np.uint8), (count, 2))
    fields: tuple[np.ndarray, ...]
    match kind:
        case "IQ2_XXS":
            groups = np.concatenate([low.reshape(count, 8, 4), sevens(signs).reshape(count, 8, 4)], axis=-1)
            fields = (one, groups.reshape(count, 64))
        case "IQ2_XS":
            fields = (one, (index | signs << 9).astype("<u2").view(np.uint8), np.zeros((count, 8), np.uint8))
        case "IQ2_S":
            fields = (one, low, signs.astype(np.uint8), packed(high, 2), np.zeros((count, 8), np.uint8))
        case "IQ3_XXS":
            fields = (one, low, sevens(signs))
        case "IQ3_S":
            fields = (one, low, packed(high, 1), signs.astype(np.uint8), np.zeros((count, 4), np.uint8))
        case "IQ1_S":
            words = (high.reshape(count, 8, 4) << np.arange(0, 12, 3)).sum(-1) | (np.arange(8) % 2 << 15)
            fields = (one, low, words.astype("<u2").view(np.uint8))
        case _:
            blocks = np.concatenate(
                [low, packed(high | (index % 3 == 0) << 3, 4), np.zeros((count, 8), np.uint8)], axis=1
            )
            fields = (with_quartered_scales(blocks, np.ones(count, "<f2")),)
    blocks = np.concatenate(fields, axis=1)
    assert blocks.shape == (count, size)
    return blocks


def packed(fields: np.ndarray, bits: int) -> np.ndarray:
    """Pack neighbours into one byte, from its lowest bits on."""
    groups = fields.reshape(len(fields), -1, 8 // bits)
    return (groups << np.arange(0, 8, bits)).sum(-1).astype(np.uint8)


def sevens(signs: np.ndarray) -> np.ndarray:
    """Pack four fields of seven bits into each word of 32."""
    groups = signs.reshape(len(signs), -1, 4).astype("<u4")
    return (groups << np.arange(0, 28, 7, dtype="<u4")).sum(-1, dtype="<u4").view(np.uint8)


def of_the_library(library: ctypes.CDLL, kind: str, blocks: np.ndarray, elements: int) -> np.ndarray:
    values = np.empty((len(blocks), elements), np.float32)
    name = kind.lower().replace("_k", "_K")
    function = getattr(library, f"dequantize_row_{name}")
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
    blocks = np.ascontiguousarray(blocks)
    function(blocks.ctypes.data, values.ctypes.data, values.size)
    return values


def answers(library: ctypes.CDLL, kind: str, blocks: np.ndarray, elements: int) -> np.ndarray:
    """Dequantise blocks to float32 [n, elements].

    Raises:
        ValueError: the library and the package do not agree.
    """
    theirs = of_the_library(library, kind, blocks, elements)
    if kind in UNKNOWN_TO_THE_PACKAGE:
        return theirs
    values = dequantize(blocks, GGMLQuantizationType[kind]).astype(np.float32).reshape(theirs.shape)
    # readers of E2M1 disagree on the sign of zero
    same = values == theirs if kind in ("MXFP4", "NVFP4") else values.view(np.uint32) == theirs.view(np.uint32)
    if not same.all():
        raise ValueError(f"{kind}: the library and the package differ in {(~same).sum()} of {same.size} values")
    return values


def main(path: str, library_path: str) -> None:
    rng, library = np.random.default_rng(7), ctypes.CDLL(library_path)
    arrays: dict[str, Any] = {}
    for kind in HALVES:
        elements, size = UNKNOWN_TO_THE_PACKAGE.get(kind) or GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        blocks = random_blocks(rng, kind, size)
        arrays[f"{kind}:blocks"] = blocks
        arrays[f"{kind}:values"] = answers(library, kind, blocks, elements)
        if kind in ENTRIES:
            every = blocks_of_all_entries(kind, size)
            arrays[f"{kind}:entries"] = every
            arrays[f"{kind}:entry_values"] = answers(library, kind, every, elements)
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
