"""Shipped LoRA products for `python -m pallas_kernels.check`: weights of Llama-3.1-8B, Qwen3, gpt-oss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.check.configuration import ADA, AMPERE, HOPPER, Configuration, shaped
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.lora import mosaic

_SHORT = {jnp.bfloat16: "bf16", jnp.float16: "fp16", jnp.float32: "fp32"}
DECODE, PREFILL = (9, 16), (39, 16)  # tiles and their rows: 32 rows of 8 adapters, a chunk of 512 rows


def product(
    x: Float[Array, "tiles rows k"],
    a: Float[Array, "slots rank k"],
    b: Float[Array, "slots n rank"],
    owners: Int[Array, " tiles"],
    occupied: Int[Array, ""],
) -> Float[Array, "tiles rows n"]:
    """Run the kernels on the operands that they read."""
    nothing = jnp.zeros(x.shape[:2], jnp.int32)
    return mosaic.of_tiles(x, a, b, Groups(nothing, nothing.reshape(-1), owners, occupied))


@dataclasses.dataclass(frozen=True)
class _Product:
    name: str
    tiles: tuple[int, int]
    rank: int
    inputs: int = 4096
    channels: int = 4096
    dtype: Any = jnp.bfloat16
    slots: int = 8

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        count, rows = self.tiles
        return product, (
            shaped(count, rows, self.inputs, dtype=self.dtype),
            shaped(self.slots, self.rank, self.inputs, dtype=self.dtype),
            shaped(self.slots, self.channels, self.rank, dtype=self.dtype),
            shaped(count, dtype=jnp.int32),
            shaped(dtype=jnp.int32),
        )

    def configuration(self) -> Configuration:
        count, rows = self.tiles
        sizes = f"{self.channels}x{self.inputs}-rank{self.rank}-{count}x{rows}rows"
        return Configuration("lora", f"{self.name}-{sizes}-{_SHORT[self.dtype]}", self.build, (HOPPER, AMPERE, ADA))


CONFIGURATIONS: tuple[Configuration, ...] = tuple(
    one.configuration()
    for one in (
        *(_Product("decode", DECODE, rank) for rank in (8, 16, 64)),
        *(_Product("prefill", PREFILL, rank) for rank in (8, 16, 64)),
        *(_Product("decode", DECODE, rank, dtype=jnp.float16) for rank in (8, 16, 64)),
        *(_Product("decode", DECODE, rank, dtype=jnp.float32) for rank in (8, 16, 64)),
        _Product("prefill", PREFILL, 16, dtype=jnp.float16),
        _Product("prefill", PREFILL, 64, dtype=jnp.float32),
        # A weight fused from several of a checkpoint has a multiple of the rank.
        _Product("decode-qkv", DECODE, 24, channels=6144),
        _Product("decode-qkv", DECODE, 48, channels=6144),
        _Product("prefill-qkv", PREFILL, 192, channels=6144),
        _Product("decode-gate-up", DECODE, 32, channels=28672),
        _Product("prefill-down", PREFILL, 16, inputs=14336),
        _Product("prefill-wide", (16, 32), 128, inputs=14336),
        _Product("prefill-wide", (16, 32), 256),
        _Product("prefill-wide", (16, 32), 192, dtype=jnp.float32),
        _Product("odd-rank", DECODE, 12),
        _Product("small", DECODE, 1, inputs=64, channels=32),
        # Experts: 128 (Qwen3-30B-A3B) or 32 (gpt-oss-20b) of each slot.
        _Product("experts", (260, 16), 32, inputs=2048, channels=1536, slots=1024),
        _Product("experts", (128, 16), 16, inputs=2880, channels=2880, slots=256),
    )
)
