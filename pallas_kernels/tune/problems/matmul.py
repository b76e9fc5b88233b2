"""Tuning of the tiles of matmul."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import shaped
from pallas_kernels.matmul.mosaic import launch
from pallas_kernels.matmul.tile_keys import MATMUL, matmul_key
from pallas_kernels.matmul.types import COLUMNS, CONSUMERS, GROUP, TOGETHER, Layout
from pallas_kernels.tune.operands import numbers, sets_beyond_cache
from pallas_kernels.tune.problem import Problem, Tunable

_MOST_GROUPS = 32  # groups of rows per consumer of a CTA


@dataclasses.dataclass(frozen=True)
class DenseShape:
    """A layer's product; ``last`` and ``gated`` are 0 or 1: weights as [out, in], and with gate and up."""

    rows: int = 64
    inputs: int = 4096
    columns: int = 6144
    last: int = 0
    gated: int = 0
    dtype: str = "bfloat16"

    @property
    def layout(self) -> Layout:
        return "in last" if self.last else "in first"

    def arguments(self) -> tuple[Any, ...]:
        """Return x and weights, as shapes."""
        outputs = (2, self.columns) if self.gated else (self.columns,)
        weights = (*outputs, self.inputs) if self.last else (self.inputs, *outputs)
        dtype = jnp.dtype(self.dtype)
        return shaped(self.rows, self.inputs, dtype=dtype), shaped(*weights, dtype=dtype)


def problem(shape: DenseShape, multiprocessors: int) -> Problem:
    arguments = shape.arguments()
    options: dict[str, Any] = {"layout": shape.layout, "gated": bool(shape.gated)}
    return Problem(
        key=matmul_key(*arguments, **options),
        heuristic=launch.heuristic_tiles(*arguments, **options, multiprocessors=multiprocessors),
        grid={
            "consumers": [one for one in CONSUMERS if GROUP * one < shape.rows + GROUP <= _MOST_GROUPS * GROUP * one],
            "columns": COLUMNS,
            "depth": (64, 128),
            "stages": (4, 6, 8, 12),
            "row_blocks": [one for one in TOGETHER if GROUP * one < shape.rows + GROUP],
            "column_blocks": TOGETHER,
            "panel": (4, 8, 16) if shape.rows > 512 else (8,),
            "blocks": (multiprocessors,),
        },
        refusal=lambda tiles: launch.refusal(*arguments, **options, tiles=tiles),
        launch=functools.partial(launch.matmul, **options),
        operands=functools.partial(_operands, arguments),
    )


def _operands(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Make operand sets with different weights: one layer's would stay in the cache, unlike a model's."""
    x, weights = arguments
    count = sets_beyond_cache(weights.size * weights.dtype.itemsize)
    given = numbers(0, x.shape, x.dtype)
    return [(given, numbers(1 + index, weights.shape, weights.dtype)) for index in range(count)]


MATMUL_TUNING = Tunable(
    kernel=MATMUL,
    bits=frozenset(),
    shapes=tuple(
        # Llama-3.1-8B: QKV, output, gate with up, down, LM head.
        DenseShape(rows, inputs, columns, last, gated)
        for rows in (64, 2048, 8, 256)
        for inputs, columns, last, gated in (
            (4096, 6144, 0, 0),
            (4096, 4096, 0, 0),
            (4096, 14336, 1, 1),
            (14336, 4096, 0, 0),
            (4096, 128256, 1, 0),
        )
    ),
    problem=problem,
)
