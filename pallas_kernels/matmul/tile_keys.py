"""Keys of the tiles of matmul, from shapes and dtypes alone."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.matmul.types import Layout, inputs_of, outputs_of
from pallas_kernels.tiles import Key

MATMUL = "matmul"


def matmul_key(x: Any, weights: Any, *, layout: Layout, gated: bool) -> Key:
    """Return the key for ``x [rows, k]``. Only the rows are a size: weights have one choice for every row count."""
    parts = 2 if gated else 1
    options = {
        "inputs": inputs_of(weights, layout),
        "columns": math.prod(outputs_of(weights, layout)) // parts,
        "parts": parts,
        "layout": layout,
        "dtype": jnp.dtype(x.dtype).name,
    }
    return Key(options, {"rows": x.shape[0]})
