"""Shipped products for `python -m pallas_kernels.check`: experts of Mixtral, DeepSeek, Qwen3 and gpt-oss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.check.configuration import Configuration, shaped
from pallas_kernels.grouped_matmul import mosaic
from pallas_kernels.grouped_matmul.groups import Groups

_SHORT = {jnp.bfloat16: "bf16", jnp.float16: "fp16"}


def product(
    x: Float[Array, "tiles rows k"],
    weights: Float[Array, "experts n k"],
    experts: Int[Array, " tiles"],
    occupied: Int[Array, ""],
    *,
    tiles: mosaic.Tiles | None = None,
) -> Float[Array, "tiles rows n"]:
    """Run the kernel on the operands that it reads."""
    return mosaic.matmul(x, weights, unfilled(x, experts, occupied), tiles=tiles)


def unfilled(x: Any, experts: Any, occupied: Any) -> Groups:
    """Return groups without entries, which the product does not read."""
    nothing = jnp.zeros(x.shape[:2], jnp.int32)
    return Groups(nothing, nothing.reshape(-1), experts, occupied)


@dataclasses.dataclass(frozen=True)
class _Product:
    tiles: int
    rows: int
    experts: int
    channels: int
    inputs: int
    dtype: Any = jnp.bfloat16

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return product, (
            shaped(self.tiles, self.rows, self.inputs, dtype=self.dtype),
            shaped(self.experts, self.channels, self.inputs, dtype=self.dtype),
            shaped(self.tiles, dtype=jnp.int32),
            shaped(dtype=jnp.int32),
        )

    def configuration(self) -> Configuration:
        sizes = f"{self.experts}x{self.channels}x{self.inputs}-{self.tiles}x{self.rows}rows"
        return Configuration("grouped_matmul", f"{sizes}-{_SHORT[self.dtype]}", self.build)


CONFIGURATIONS: tuple[Configuration, ...] = tuple(
    one.configuration()
    for one in (
        # Mixtral-8x7B: gate with up, and down; decode of 1 and 64 tokens, prefill of 512.
        _Product(2, 8, 8, 28672, 4096),
        _Product(2, 8, 8, 4096, 14336),
        _Product(11, 32, 8, 28672, 4096),
        _Product(11, 32, 8, 4096, 14336),
        _Product(15, 128, 8, 28672, 4096),
        _Product(15, 128, 8, 4096, 14336),
        _Product(15, 128, 8, 28672, 4096, dtype=jnp.float16),
        # DeepSeek-V2 and a shard of it, Qwen3-30B-A3B, gpt-oss-20b.
        _Product(205, 64, 160, 3072, 5120),
        _Product(43, 128, 20, 5120, 1536),
        _Product(152, 16, 128, 1536, 2048),
        _Product(152, 16, 128, 2048, 768),
        _Product(44, 32, 32, 5760, 2880),
        _Product(44, 32, 32, 2880, 2880),
    )
)
