"""Keys of the tiles of quant_matmul, from shapes and dtypes alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.tiles import Key

MATMUL = "quant_matmul"


def matmul_key(given: Any) -> Key:
    """Return the key for `fit.Operands`. The weights' shape is an option: it determines the splits of k."""
    (tiles, rows, _), (_, channels, inputs) = given.x.shape, given.weights.shape
    options = {
        "channels": channels,
        "inputs": inputs,
        "group": given.group,
        "weights": "e2m1" if given.e2m1 else jnp.dtype(given.weights.dtype).name,
        "dtype": jnp.dtype(given.x.dtype).name,
        "scales": jnp.dtype(given.scales.dtype).name,
        "zeros": int(given.zeros is not None),
        "grouped": int(given.grouped),
    }
    return Key(options, {"tiles": tiles, "rows": rows})
