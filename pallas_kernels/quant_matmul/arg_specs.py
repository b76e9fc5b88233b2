"""Shapes of products with quantized weights: layers of Llama-3.1-8B, smaller models and mixtures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.grouped_matmul.arg_specs import TRIED_EXPERTS, Mixture, trial_groups, unfilled
from pallas_kernels.operands import Case, Draw, operand_sets, sets_beyond_cache
from pallas_kernels.quant_matmul.fit import heuristic_tiles, of_rows, refusal
from pallas_kernels.quant_matmul.mosaic import launch
from pallas_kernels.quant_matmul.tile_keys import MATMUL, matmul_key
from pallas_kernels.quant_matmul.types import CONSUMERS, MOST_SPLITS
from pallas_kernels.specs import SHORT, Problem, Spec, Tunable, ints, shaped

_SHORT = {**SHORT, "float32": "f32"}


@dataclasses.dataclass(frozen=True)
class Product(Spec):
    """A layer's product. ``group`` 0: a scale per channel; ``e2m1``: MXFP4."""

    rows: int = 16
    channels: int = 4096
    inputs: int = 4096
    group: int = 128
    weights: str = "int4"
    dtype: str = "bfloat16"
    scales: str = "bfloat16"
    zeros: int = 0
    e2m1: int = 0

    op = "quant_matmul"

    def __str__(self) -> str:
        return f"int{self.bits} matmul, {self.rows} rows, {self.inputs} x {self.channels}"

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return 4 if self.weights == "int4" else 8

    @property
    def bytes(self) -> int:
        """Bytes of the weight and its 16-bit scales in groups, of rows and of results."""
        weight = self.inputs * self.channels
        return weight * self.bits // 8 + weight // self.group * 2 + 2 * self.rows * (self.inputs + self.channels)

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.inputs * self.channels

    @property
    def name(self) -> str:
        weights = "mxfp4" if self.e2m1 else _SHORT[self.weights]
        kind = f"group{self.group}" if self.group else "channel"
        numbers = f"{weights}-{_SHORT[self.dtype]}-{_SHORT[self.scales]}-{kind}{'-zeros' * self.zeros}"
        return f"{self.channels}x{self.inputs}-rows{self.rows}-{numbers}"

    @property
    def kernel(self) -> Callable[..., Any]:
        return functools.partial(launch.matmul, e2m1=bool(self.e2m1))

    def arguments(self) -> tuple[Any, ...]:
        factors = (self.inputs // self.group, self.channels) if self.group else (self.channels,)
        return (
            shaped(self.rows, self.inputs, dtype=self.dtype),
            shaped(self.channels, self.inputs, dtype=self.weights),
            shaped(*factors, dtype=self.scales),
            shaped(*factors, dtype="int8") if self.zeros else None,
        )

    def operands(self, draw: Draw) -> tuple[Any, ...]:
        return trial_case(draw, *self.arguments(), e2m1=self.e2m1).operands

    def problem(self, multiprocessors: int) -> Problem:
        arguments = self.arguments()
        given = of_rows(*arguments, e2m1=bool(self.e2m1))
        return Problem(
            key=matmul_key(given),
            heuristic=heuristic_tiles(given, multiprocessors=multiprocessors),
            grid={
                "consumers": CONSUMERS,
                "depth": (128, 256),
                "stages": (2, 3, 4, 6),
                "splits": tuple(range(1, MOST_SPLITS + 1)),
                "blocks": (multiprocessors,),
            },
            refusal=lambda tiles: refusal(given, tiles=tiles),
            launch=self.kernel,
            operands=functools.partial(
                operand_sets,
                self.operands,
                varied=1,
                count=sets_beyond_cache(arguments[1].size * self.bits // 8),
            ),
        )


@dataclasses.dataclass(frozen=True)
class Experts(Product):
    """A product of ``tiles`` of ``rows`` rows with an expert each."""

    tiles: int = 8
    experts: int = 8

    @property
    def name(self) -> str:
        return f"{self.tiles}tiles-{self.experts}experts-{super().name}"

    @property
    def kernel(self) -> Callable[..., Any]:
        return self._multiply

    def _multiply(self, x: Any, weights: Any, scales: Any, zeros: Any, experts: Any, occupied: Any) -> Any:
        groups = unfilled(x, experts, occupied)
        return launch.matmul_tiles(x, weights, scales, zeros, groups, e2m1=bool(self.e2m1))

    def arguments(self) -> tuple[Any, ...]:
        factors = (self.inputs // (self.group or self.inputs), self.experts, self.channels)
        return (
            shaped(self.tiles, self.rows, self.inputs, dtype=self.dtype),
            shaped(self.experts, self.channels, self.inputs, dtype=self.weights),
            shaped(*factors, dtype=self.scales),
            shaped(*factors, dtype="int8") if self.zeros else None,
            ints(self.tiles),
            ints(),
        )


class StoredMixture(Mixture):
    """A product with experts in MXFP4, with one exponent byte per 32 weights."""

    stored = " in MXFP4"

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes * 17 // 64

    def operands(self, draw: Draw) -> tuple[Any, ...]:
        x, weights, experts = super().operands(draw)
        exponents = jnp.full((self.inputs // 32, *weights.shape[:2]), 120, jnp.uint8)
        return x, jnp.clip(draw.normal(shaped(*weights.shape, dtype="int4")), -7, 7), experts, exponents


_FP16: dict[str, Any] = {"dtype": "float16", "scales": "float16"}
_INT8: dict[str, Any] = {"weights": "int8"}
_FP8: dict[str, Any] = {"weights": "float8_e4m3fn", "scales": "float32"}
_MXFP4: dict[str, Any] = {"group": 32, "scales": "uint8", "e2m1": 1}
_GPT_OSS: dict[str, Any] = {**_MXFP4, "experts": 32, "inputs": 2880}

SHIPPED = (
    Product(1),
    Product(16),
    Product(16, zeros=1),
    Product(32, 28672),
    Product(32, 28672, zeros=1),
    Product(56, 28672),
    Product(56, 28672, zeros=1),
    Product(56, 28672, **_FP16, zeros=1),
    Product(56, 28672, **_MXFP4),
    Product(64, 6144, zeros=1),
    Product(64, 6144, **_MXFP4),
    Product(64, 28672),
    Product(64, 28672, zeros=1),
    Product(64, 28672, **_FP16, zeros=1),
    Product(64, 28672, **_INT8, zeros=1),
    Product(64, 28672, **_FP8),
    Product(64, zeros=1),
    Product(16, 6144),
    Product(16, inputs=14336),
    Product(16, 14336, scales="float32"),
    Product(16, 1536, 8960),
    Product(16, 896, 4864, 64),
    Product(16, inputs=11008 + 128),
    Product(16, **_FP16, zeros=1),
    Product(64, **_FP16),
    Product(16, **_INT8),
    Product(64, **_INT8, zeros=1),
    Product(16, **_INT8, group=0, scales="float32"),
    Product(16, **_INT8, group=0, dtype="float16", scales="float32"),
    Product(16, **_FP8, group=0),
    Product(64, **_FP8),
    Product(128),
    Product(256),
    Product(2048),
    Product(2048, 28672, zeros=1),
    Product(2048, 28672, group=32),
    Product(4096, inputs=14336),
    Product(4096, inputs=14336, **_FP16, zeros=1),
    Product(2048, 896, 4864, 64),
    Product(2048, **_INT8, zeros=1),
    Product(2048, 28672, **_FP8),
    Product(16, group=32, scales="float16"),
    Product(16, **_INT8, group=32, scales="float16"),
    Product(64, 28672, **_INT8, group=32, zeros=1),
    Product(16, 192, **_INT8, zeros=1),
    Product(2048, 192, zeros=1),
    Product(16, 192, zeros=1),
    Product(16, **_MXFP4),
    Product(64, 28672, **_MXFP4),
    Product(2048, 28672, **_MXFP4),
    Experts(8, 28672, tiles=8),
    Experts(56, 28672, tiles=40, zeros=1),
    Experts(64, 28672, tiles=40, zeros=1),
    Experts(64, 1536, tiles=40, zeros=1),
    Experts(128, inputs=14336, tiles=40),
    Experts(128, inputs=14336, tiles=40, **_FP8),
    Experts(8, 5760, tiles=32, **_GPT_OSS),
    Experts(16, 2880, tiles=32, **_GPT_OSS),
    Experts(64, 2880, tiles=96, **_GPT_OSS),
    Experts(128, 5760, tiles=96, **_GPT_OSS),
    Experts(128, 2880, tiles=96, **_GPT_OSS),
    Experts(8, 2880, tiles=32, **{**_GPT_OSS, "inputs": 1440}),
    Experts(128, 2880, tiles=96, **{**_GPT_OSS, "inputs": 1440}),
)
TUNED = (
    Tunable(
        kernel=MATMUL,
        bits=frozenset({"splits"}),
        shapes=tuple(
            Product(rows, channels, inputs, zeros=zeros)
            for zeros in (0, 1)
            for rows in (16, 1, 64, 2048)
            # Llama-3.1-8B: output, QKV, gate with up, down.
            for channels, inputs in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
        ),
        problem=Product.problem,
    ),
)


def trial_case(draw: Draw, x: Any, weights: Any, scales: Any, zeros: Any, *groups: Any, **options: Any) -> Case:
    """Make a product of rows, or of tiles of rows that have an expert each."""
    experts = min(TRIED_EXPERTS, weights.shape[0]) if groups else None
    factors = shaped(scales.shape[0], experts, scales.shape[2], dtype=scales.dtype) if experts else scales
    offsets = None if zeros is None else shaped(*factors.shape, dtype=zeros.dtype)
    if options.get("e2m1"):
        small = draw.integers(factors, 118, 122).astype(scales.dtype)  # powers of two, by their exponents
    else:
        small = draw.uniform(factors, 0.005, 0.01)
    numbers = draw.normal(weights, first=experts)
    operands = (
        draw.normal(x),
        jnp.clip(numbers, -7, 7).astype(weights.dtype) if options.get("e2m1") else numbers,
        small,
        None if offsets is None else draw.integers(offsets, -4, 5).astype(offsets.dtype),
        *(trial_groups(draw, each, experts or 1) for each in groups),
    )
    return Case(operands, options)
