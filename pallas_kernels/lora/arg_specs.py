"""Shapes of LoRA products: weights of Llama-3.1-8B, Qwen3 and gpt-oss."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.arg_specs import trial_groups, unfilled
from pallas_kernels.lora import mosaic
from pallas_kernels.operands import Case, Draw
from pallas_kernels.specs import EVERYWHERE, SHORT, Spec, ints, shaped

DECODE, PREFILL = (9, 16), (39, 16)  # tiles and their rows: 32 rows of 8 adapters, a chunk of 512 rows


def product(
    x: Float[Array, "tiles rows k"],
    a: Float[Array, "slots rank k"],
    b: Float[Array, "slots n rank"],
    owners: Int[Array, " tiles"],
    occupied: Int[Array, ""],
) -> Float[Array, "tiles rows n"]:
    """Run the kernels on the operands that they read."""
    return mosaic.of_tiles(x, a, b, unfilled(x, owners, occupied))


@dataclasses.dataclass(frozen=True)
class Product(Spec):
    """A product of tiles of rows (their number and rows) with an adapter each."""

    label: str
    tiles: tuple[int, int]
    rank: int
    inputs: int = 4096
    channels: int = 4096
    dtype: str = "bfloat16"
    slots: int = 8

    op = "lora"
    targets = EVERYWHERE
    kernel = staticmethod(product)

    @property
    def name(self) -> str:
        count, rows = self.tiles
        sizes = f"{self.channels}x{self.inputs}-rank{self.rank}-{count}x{rows}rows"
        return f"{self.label}-{sizes}-{SHORT[self.dtype]}"

    def arguments(self) -> tuple[Any, ...]:
        return (
            shaped(*self.tiles, self.inputs, dtype=self.dtype),
            shaped(self.slots, self.rank, self.inputs, dtype=self.dtype),
            shaped(self.slots, self.channels, self.rank, dtype=self.dtype),
            ints(self.tiles[0]),
            ints(),
        )


SHIPPED = (
    *(Product("decode", DECODE, rank) for rank in (8, 16, 64)),
    *(Product("prefill", PREFILL, rank) for rank in (8, 16, 64)),
    *(Product("decode", DECODE, rank, dtype="float16") for rank in (8, 16, 64)),
    *(Product("decode", DECODE, rank, dtype="float32") for rank in (8, 16, 64)),
    Product("prefill", PREFILL, 16, dtype="float16"),
    Product("prefill", PREFILL, 64, dtype="float32"),
    # A weight fused from several of a checkpoint has a multiple of the rank.
    Product("decode-qkv", DECODE, 24, channels=6144),
    Product("decode-qkv", DECODE, 48, channels=6144),
    Product("prefill-qkv", PREFILL, 192, channels=6144),
    Product("decode-gate-up", DECODE, 32, channels=28672),
    Product("prefill-down", PREFILL, 16, inputs=14336),
    Product("prefill-wide", (16, 32), 128, inputs=14336),
    Product("prefill-wide", (16, 32), 256),
    Product("prefill-wide", (16, 32), 192, dtype="float32"),
    Product("odd-rank", DECODE, 12),
    Product("small", DECODE, 1, inputs=64, channels=32),
    # Experts: 128 (Qwen3-30B-A3B) or 32 (gpt-oss-20b) of each slot.
    Product("experts", (260, 16), 32, inputs=2048, channels=1536, slots=1024),
    Product("experts", (128, 16), 16, inputs=2880, channels=2880, slots=256),
)


def trial_case(draw: Draw, x: Any, a: Any, b: Any, groups: Any) -> Case:
    matrices = (draw.normal(each, each.shape[-1] ** -0.5) for each in (a, b))
    return Case((draw.normal(x), *matrices, trial_groups(draw, groups, a.shape[0])))
