"""Tuning of the tiles of grouped_matmul."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.check.configuration import shaped
from pallas_kernels.check.configurations.grouped_matmul import product
from pallas_kernels.grouped_matmul.groups import Groups, group
from pallas_kernels.grouped_matmul.mosaic import CONSUMERS, heuristic_tiles, refusal
from pallas_kernels.grouped_matmul.tile_keys import MATMUL, matmul_key
from pallas_kernels.tune.operands import numbers, sets_beyond_cache
from pallas_kernels.tune.problem import Problem, Tunable


@dataclasses.dataclass(frozen=True)
class GroupedShape:
    """A product of a layer of ``experts``, with ``top_k`` experts for each of ``tokens`` tokens."""

    tokens: int = 64
    experts: int = 8
    top_k: int = 2
    channels: int = 28672
    inputs: int = 4096
    dtype: str = "bfloat16"

    def groups(self) -> Groups:
        """Route the entries evenly to all experts."""
        owners = jnp.arange(self.tokens * self.top_k, dtype=jnp.int32) % self.experts
        return group(owners, self.experts, self.tokens, path="mosaic")

    def arguments(self) -> tuple[Any, ...]:
        """Return x in tiles, and weights, as shapes."""
        tiles, rows = jax.eval_shape(self.groups).entries.shape
        dtype = jnp.dtype(self.dtype)
        return (
            shaped(tiles, rows, self.inputs, dtype=dtype),
            shaped(self.experts, self.channels, self.inputs, dtype=dtype),
        )


def problem(shape: GroupedShape, multiprocessors: int) -> Problem:
    arguments = shape.arguments()
    return Problem(
        key=matmul_key(*arguments),
        heuristic=heuristic_tiles(*arguments, multiprocessors=multiprocessors),
        grid={
            "consumers": CONSUMERS,
            "depth": (64, 128),
            "stages": (2, 3, 4, 6, 8),
            "blocks": (multiprocessors, 2 * multiprocessors),
        },
        refusal=lambda tiles: refusal(*arguments, tiles=tiles),
        launch=product,
        operands=functools.partial(_operands, shape),
    )


def _operands(shape: GroupedShape) -> list[tuple[Any, ...]]:
    """Make operand sets with different weights: one layer's would stay in the cache, unlike a model's."""
    x, weights = shape.arguments()
    groups = shape.groups()
    given = numbers(0, x.shape, x.dtype)
    count = sets_beyond_cache(2 * weights.size)
    drawn = (numbers(1 + index, weights.shape, weights.dtype) for index in range(count))
    return [(given, one, groups.experts, groups.occupied) for one in drawn]


MATMUL_TUNING = Tunable(
    kernel=MATMUL,
    bits=frozenset(),
    shapes=(
        # Mixtral-8x7B: gate with up, down; decode of 64 tokens, prefill of 512, decode of one.
        *(
            GroupedShape(tokens=tokens, channels=channels, inputs=inputs)
            for tokens in (64, 512, 1)
            for channels, inputs in ((28672, 4096), (4096, 14336))
        ),
        # Qwen3-30B-A3B.
        GroupedShape(experts=128, top_k=8, channels=1536, inputs=2048),
        GroupedShape(experts=128, top_k=8, channels=2048, inputs=768),
    ),
    problem=problem,
)
