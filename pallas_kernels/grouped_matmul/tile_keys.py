"""Keys of the tiles of grouped_matmul, from shapes and dtypes alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.tiles import Key

MATMUL = "grouped_matmul"


def matmul_key(x: Any, weights: Any) -> Key:
    """Return the key for ``x [tiles, rows, k]`` and ``weights [experts, n, k]``."""
    options = {
        "rows": x.shape[1],
        "channels": weights.shape[1],
        "inputs": weights.shape[2],
        "dtype": jnp.dtype(x.dtype).name,
    }
    return Key(options, {"tiles": x.shape[0]})
