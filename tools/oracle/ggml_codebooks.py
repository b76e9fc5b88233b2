"""Generator of ``jaxinfer/quant/codebooks.npz``: the points in the codebooks of the GGUF format, from llama.cpp.

Needs numpy and the package ``gguf`` (0.19.0 made the committed file):

    python -m tools.oracle.ggml_codebooks jaxinfer/quant/codebooks.npz
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from gguf import quants

KINDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")


def bitmap(kind: str) -> np.ndarray:
    """Return uint8: a bit for each point with coordinates from the kind's values, set if in the codebook.

    Raises:
        ValueError: entries are not in the order of the points, which is that of their coordinates, the last one first.
    """
    reader = getattr(quants, kind)
    reader.init_grid()
    values = np.asarray(reader.grid_map, np.float32)
    entries = reader.grid.reshape(reader.grid_shape)
    digits = np.searchsorted(values, entries)
    points = (digits * len(values) ** np.arange(entries.shape[1])).sum(-1)
    if (values[digits] != entries).any() or (np.diff(points) <= 0).any():
        raise ValueError(f"the codebook of {kind} is no ascending list of points")
    chosen = np.zeros(len(values) ** entries.shape[1], bool)
    chosen[points] = True
    return np.packbits(chosen, bitorder="little")


def main(path: str) -> None:
    bitmaps: dict[str, Any] = {kind: bitmap(kind) for kind in KINDS}
    np.savez_compressed(path, **bitmaps)


if __name__ == "__main__":
    main(sys.argv[1])
