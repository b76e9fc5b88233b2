"""Codebooks of the GGUF format: the points that indices in blocks of IQ1_S, IQ2_XXS, ..., IQ3_S select.

Each is a set of points with 4 or 8 coordinates out of a few values, in ascending order with the last coordinate most
significant, so that one bit per point encodes it (``codebooks.npz``, 3 kB). ggml's authors chose the points, published
as a part of the format (https://github.com/ggml-org/ggml, ggml-common.h, MIT licence);
``tools/oracle/ggml_codebooks.py`` writes the file.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

_FILE = pathlib.Path(__file__).with_suffix(".npz")
_TWO_BITS, _ONE_BIT = (8, 25, 43), (-1, 0, 1)

# Name in the file, values of a coordinate, and number of coordinates.
_BOOKS: Mapping[str, tuple[str, tuple[int, ...], int]] = MappingProxyType(
    {
        "IQ1_S": ("IQ1_S", _ONE_BIT, 8),
        "IQ1_M": ("IQ1_S", _ONE_BIT, 8),
        "IQ2_XXS": ("IQ2_XXS", _TWO_BITS, 8),
        "IQ2_XS": ("IQ2_XS", _TWO_BITS, 8),
        "IQ2_S": ("IQ2_S", _TWO_BITS, 8),
        "IQ3_XXS": ("IQ3_XXS", (4, 12, 20, 28, 36, 44, 52, 62), 4),
        "IQ3_S": ("IQ3_S", (1, 3, 5, 7, 9, 11, 13, 15), 4),
    }
)


@functools.cache
def entries(kind: str) -> np.ndarray:
    """Return int8 [entries, coordinates] for a block kind, read-only."""
    name, values, width = _BOOKS[kind]
    with np.load(_FILE, allow_pickle=False) as file:
        points = np.flatnonzero(np.unpackbits(file[name], bitorder="little"))
    digits = points[:, None] // len(values) ** np.arange(width) % len(values)
    book = np.asarray(values, np.int8)[digits]
    book.flags.writeable = False
    return book
