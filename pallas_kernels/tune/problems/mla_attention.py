"""Tuning of the tiles of MLA's decode kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import shaped
from pallas_kernels.mla_attention.mosaic.attention import extend, heuristic_tiles, refusal
from pallas_kernels.mla_attention.options import RANK, LatentOptions
from pallas_kernels.mla_attention.tile_keys import DECODE, decode_key
from pallas_kernels.tune.operands import MOST_SETS, filled, numbers, tables
from pallas_kernels.tune.problem import Problem, Tunable

_ROPE = 64


@dataclasses.dataclass(frozen=True)
class MlaShape:
    """DeepSeek-V3's heads on one device; every sequence has ``context`` keys."""

    sequences: int = 64
    context: int = 4096
    chunk: int = 1
    heads: int = 128
    page: int = 64
    dtype: str = "bfloat16"

    def arguments(self) -> tuple[Any, ...]:
        """Return queries, pool and tables, as shapes."""
        width, latent = self.context // self.page, RANK + _ROPE
        return (
            shaped(self.sequences, self.chunk, self.heads, latent, dtype=jnp.dtype(self.dtype)),
            shaped(self.sequences * width, self.page, latent, dtype=jnp.dtype(self.dtype)),
            shaped(self.sequences, width, dtype=jnp.int32),
        )


def problem(shape: MlaShape, multiprocessors: int) -> Problem:
    q, pool, table = shape.arguments()
    per_sequence, options = shaped(shape.sequences, dtype=jnp.int32), LatentOptions(192**-0.5)

    def refuses(_: Any) -> str | None:
        return refusal((q, pool, table, per_sequence, per_sequence), options)

    return Problem(
        key=decode_key(q, pool, table),
        heuristic=heuristic_tiles(shape.heads),
        grid={
            "keys_per_split": (256, 512, 1024, 2048, 4096, 8192),
            "blocks": (multiprocessors, 2 * multiprocessors),
        },
        refusal=refuses,
        launch=functools.partial(extend, options=options),
        operands=functools.partial(_operands, shape, q, pool),
    )


def _operands(shape: MlaShape, q: Any, pool: Any) -> list[tuple[Any, ...]]:
    shared = (
        numbers(0, pool.shape, pool.dtype),
        tables(shape.sequences, shape.context // shape.page),
        filled(shape.sequences, shape.context - shape.chunk),
        filled(shape.sequences, shape.context),
    )
    return [(numbers(1 + index, q.shape, q.dtype), *shared) for index in range(MOST_SETS)]


DECODE_TUNING = Tunable(
    kernel=DECODE,
    bits=frozenset({"keys_per_split"}),
    shapes=(
        MlaShape(),
        MlaShape(sequences=1),
        MlaShape(sequences=128),
        MlaShape(heads=16),
        MlaShape(heads=16, sequences=1),
        MlaShape(heads=32),
        MlaShape(heads=16, page=16),
    ),
    problem=problem,
)
