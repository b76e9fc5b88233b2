"""Tuning of the tiles of paged prefill."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.check.configuration import shaped
from pallas_kernels.paged_attention.hopper.prefill.launch import heuristic_tiles, prefill, refusal
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.spans import KEYS_PER_SPLIT
from pallas_kernels.paged_attention.tile_keys import PREFILL, prefill_key
from pallas_kernels.tune.operands import filled, numbers, tables
from pallas_kernels.tune.problem import Problem, Tunable

_SETS = 2  # a launch takes long enough


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """Llama-3.1-8B's heads; the chunks are the last tokens of their contexts. ``scales``: "head", "token" or ""."""

    sequences: int = 1
    chunk: int = 8192
    context: int = 8192
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
            shaped(self.sequences, self.chunk, heads, self.head_dim, dtype=jnp.dtype(self.dtype)),
            shaped(self.sequences * width, 2, self.kv_heads, self.page, self.head_dim, dtype=jnp.dtype(self.pool)),
            shaped(self.sequences, width, dtype=jnp.int32),
        )


def _factors(shape: PrefillShape, pool: Any) -> Any | None:
    return shaped(*pool.shape[: {"head": 3, "token": 4}[shape.scales]], dtype=jnp.float32) if shape.scales else None


def problem(shape: PrefillShape, _: int) -> Problem:
    """Return the problem for any number of multiprocessors: a CTA has one tile."""
    q, pool, table = shape.arguments()
    options = AttentionOptions(shape.head_dim**-0.5, scales=_factors(shape, pool))
    per_sequence = shaped(shape.sequences, dtype=jnp.int32)
    return Problem(
        key=prefill_key(q, pool, table, options),
        heuristic=heuristic_tiles(group=shape.group, head_dim=shape.head_dim, tree=False, quantized=bool(shape.scales)),
        grid={
            "block_keys": (64, 128),
            "stages": (2, 3, 4, 5, 6),
            "heads": (1, 2, 4, 8, 16),
            "keys_per_split": (KEYS_PER_SPLIT,),
        },
        refusal=functools.partial(refusal, (q, pool, table, per_sequence, per_sequence), options),
        launch=prefill,
        operands=functools.partial(_operands, shape, q, pool, options),
    )


def _operands(shape: PrefillShape, q: Any, pool: Any, options: AttentionOptions) -> list[tuple[Any, ...]]:
    shared = (
        numbers(0, pool.shape, pool.dtype),
        tables(shape.sequences, shape.context // shape.page),
        filled(shape.sequences, shape.context - shape.chunk),
        filled(shape.sequences, shape.context),
        jax.tree.map(lambda factors: jnp.full(factors.shape, 0.01, jnp.float32), options),
    )
    return [(numbers(1 + index, q.shape, q.dtype), *shared) for index in range(_SETS)]


PREFILL_TUNING = Tunable(
    kernel=PREFILL,
    bits=frozenset({"block_keys"}),
    shapes=(
        PrefillShape(),
        PrefillShape(sequences=4, chunk=512, context=4096),
        PrefillShape(chunk=2048, context=2048),
        PrefillShape(page=16),
        PrefillShape(page=16, sequences=4, chunk=512, context=4096),
        PrefillShape(head_dim=64),
        PrefillShape(head_dim=256, kv_heads=4, group=2),
        PrefillShape(pool="int8", scales="token"),
        PrefillShape(pool="float8_e4m3fn", scales="token", head_dim=256, kv_heads=4, group=2),
        PrefillShape(pool="float8_e4m3fn", scales="head"),
    ),
    problem=problem,
)
