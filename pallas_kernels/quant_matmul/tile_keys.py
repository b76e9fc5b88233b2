"""Keys of the tiles of quant_matmul, from shapes and dtypes alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.quant_matmul.reference import group_size
from pallas_kernels.tiles import Key

MATMUL = "quant_matmul"


def matmul_key(x: Any, weights: Any, scales: Any, zeros: Any = None) -> Key:
    """Key for ``x [rows, k]``. The weights' shape is an option: it decides how often k is split."""
    channels, inputs = weights.shape
    options = {
        "channels": channels,
        "inputs": inputs,
        "group": group_size(weights, scales, zeros),
        "weights": jnp.dtype(weights.dtype).name,
        "dtype": jnp.dtype(x.dtype).name,
        "scales": jnp.dtype(scales.dtype).name,
        "zeros": int(zeros is not None),
    }
    return Key(options, {"rows": x.shape[0]})
