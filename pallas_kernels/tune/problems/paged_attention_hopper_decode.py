"""Tuning of the tiles of paged decode."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.check.configuration import shaped
from pallas_kernels.paged_attention.hopper.decode.launch import extend, heuristic_tiles, refusal
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.spans import KEYS_PER_SPLIT
from pallas_kernels.paged_attention.tile_keys import DECODE, decode_key
from pallas_kernels.tune.operands import MOST_SETS, filled, numbers, tables
from pallas_kernels.tune.problem import Problem, Tunable


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Llama-3.1-8B's heads; every row has ``context`` keys. ``scales``: "head", "token" or ""."""

    rows: int = 64
    context: int = 4096
    chunk: int = 1
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page: int = 64
    dtype: str = "bfloat16"
    pool: str = "bfloat16"
    scales: str = ""

    def arguments(self) -> tuple[Any, ...]:
        """Return queries, pool and tables, as shapes."""
        width, heads = self.context // self.page, self.kv_heads * self.group
        return (
            shaped(self.rows, self.chunk, heads, self.head_dim, dtype=jnp.dtype(self.dtype)),
            shaped(self.rows * width, 2, self.kv_heads, self.page, self.head_dim, dtype=jnp.dtype(self.pool)),
            shaped(self.rows, width, dtype=jnp.int32),
        )


def _factors(shape: DecodeShape, pool: Any) -> Any | None:
    return shaped(*pool.shape[: {"head": 3, "token": 4}[shape.scales]], dtype=jnp.float32) if shape.scales else None


def problem(shape: DecodeShape, multiprocessors: int) -> Problem:
    q, pool, table = shape.arguments()
    options = AttentionOptions(shape.head_dim**-0.5, scales=_factors(shape, pool))
    per_row = shaped(shape.rows, dtype=jnp.int32)
    queries = shape.chunk * shape.group
    return Problem(
        key=decode_key(q, pool, table, options),
        heuristic=heuristic_tiles(shape.head_dim, shape.page, q.dtype, pool.dtype, queries=queries),
        grid={
            "block_keys": (64, 128),
            "stages": (2, 3, 4, 6, 8),
            "keys_per_split": (KEYS_PER_SPLIT,),
            "blocks": tuple(multiprocessors * waves for waves in (1, 2, 3, 4)),
        },
        refusal=functools.partial(refusal, (q, pool, table, per_row, per_row), options),
        launch=extend,
        operands=functools.partial(_operands, shape, q, pool, options),
    )


def _operands(shape: DecodeShape, q: Any, pool: Any, options: AttentionOptions) -> list[tuple[Any, ...]]:
    shared = (
        numbers(0, pool.shape, pool.dtype),
        tables(shape.rows, shape.context // shape.page),
        filled(shape.rows, shape.context - shape.chunk),
        filled(shape.rows, shape.context),
        jax.tree.map(lambda factors: jnp.full(factors.shape, 0.01, jnp.float32), options),
    )
    return [(numbers(1 + index, q.shape, q.dtype), *shared) for index in range(MOST_SETS)]


DECODE_TUNING = Tunable(
    kernel=DECODE,
    bits=frozenset({"block_keys"}),  # of 8-bit pools; the keys of a split are fixed, as prefill shares them
    shapes=(
        DecodeShape(),
        DecodeShape(rows=8),
        DecodeShape(rows=1),
        DecodeShape(rows=256, context=2048),
        DecodeShape(page=16),
        DecodeShape(page=16, rows=8),
        DecodeShape(page=16, rows=256, context=2048),
        DecodeShape(head_dim=64),
        DecodeShape(head_dim=256, kv_heads=4, group=2),
        DecodeShape(pool="int8", scales="token"),
        DecodeShape(pool="float8_e4m3fn", scales="head"),
    ),
    problem=problem,
)
