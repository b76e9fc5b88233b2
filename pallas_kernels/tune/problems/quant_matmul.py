"""Tuning of the tiles of quant_matmul."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import shaped
from pallas_kernels.quant_matmul.fit import heuristic_tiles, of_rows, refusal
from pallas_kernels.quant_matmul.mosaic.launch import matmul
from pallas_kernels.quant_matmul.tile_keys import MATMUL, matmul_key
from pallas_kernels.quant_matmul.types import CONSUMERS, MOST_SPLITS
from pallas_kernels.tune.operands import numbers, sets_beyond_cache
from pallas_kernels.tune.problem import Problem, Tunable


@dataclasses.dataclass(frozen=True)
class MatmulShape:
    """A layer's product; ``zeros`` is 0 or 1."""

    rows: int = 16
    channels: int = 4096
    inputs: int = 4096
    group: int = 128
    weights: str = "int4"
    dtype: str = "bfloat16"
    scales: str = "bfloat16"
    zeros: int = 0

    def arguments(self) -> tuple[Any, ...]:
        """Return x, weights, scales and zeros, as shapes."""
        factors = (self.inputs // self.group, self.channels)
        return (
            shaped(self.rows, self.inputs, dtype=jnp.dtype(self.dtype)),
            shaped(self.channels, self.inputs, dtype=jnp.dtype(self.weights)),
            shaped(*factors, dtype=jnp.dtype(self.scales)),
            shaped(*factors, dtype=jnp.int8) if self.zeros else None,
        )


def problem(shape: MatmulShape, multiprocessors: int) -> Problem:
    arguments = shape.arguments()
    given = of_rows(*arguments)
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
        launch=matmul,
        operands=functools.partial(_operands, arguments),
    )


def _operands(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Make operand sets with different weights: one layer's would stay in the cache, unlike a model's."""
    x, weights, scales, zeros = arguments
    bits = 4 if weights.dtype == jnp.int4 else 8
    count = sets_beyond_cache(weights.size * bits // 8)
    factors = jnp.full(scales.shape, 0.01, scales.dtype)
    offsets = None if zeros is None else jnp.full(zeros.shape, 1, zeros.dtype)
    given = numbers(0, x.shape, x.dtype)
    return [(given, numbers(1 + index, weights.shape, weights.dtype), factors, offsets) for index in range(count)]


def _shapes(*products: tuple[int, int], **options: Any) -> tuple[MatmulShape, ...]:
    return tuple(
        MatmulShape(rows=rows, channels=channels, inputs=inputs, **options)
        for rows in (16, 1, 64, 2048)
        for channels, inputs in products
    )


MATMUL_TUNING = Tunable(
    kernel=MATMUL,
    bits=frozenset({"splits"}),
    shapes=(
        # Llama-3.1-8B: output, QKV, gate with up, down.
        *_shapes((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)),
        *_shapes((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), zeros=1),
    ),
    problem=problem,
)
