"""LoRA products, each row with its adapter: group rows into tiles, multiply, and restore the order of rows."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.lora import group
from pallas_kernels.lora import mosaic as kernel
from pallas_kernels.lora import xla as plain

__all__ = ["mosaic", "xla"]


def mosaic(x: jax.Array, a: jax.Array, b: jax.Array, slots: jax.Array, **options: Any) -> jax.Array:
    """Multiply ``x[i]`` by ``a`` and ``b`` of ``slots[i]`` with the Mosaic kernel.

    Args:
        options: options of the kernel.
    """
    return kernel.low_rank(x, a, b, group(slots, a.shape[0], x.shape[0], path="mosaic"), **options)


def xla(x: jax.Array, a: jax.Array, b: jax.Array, slots: jax.Array) -> jax.Array:
    """Multiply ``x[i]`` by ``a`` and ``b`` of ``slots[i]`` with XLA."""
    return plain.low_rank(x, a, b, group(slots, a.shape[0], x.shape[0], path="xla"))
