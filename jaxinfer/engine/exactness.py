"""Proof, before READY, that chunks may share a program: the same bits for a chunk alone and among others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.step import PrefillBatch, StepState

# Rounding to 16 bits hides most differences of a last bit in float32, so that more elements must be seen to be sure.
_ELEMENTS = {4: 1, 2: 4_000_000}
_ROUNDS = 8

Prefill = Callable[[Any, StepState, PrefillBatch], StepState]


def proved_lanes(
    prefill: Mapping[tuple[int, int], Prefill], engine: ResolvedEngine, params: Any, state: StepState, vocab: int
) -> tuple[dict[int, int], StepState]:
    """Chunks per wide program, by size, of those programs that give the bits of the narrow one.

    Whether a row's sums are taken in the same order at another row count is a property of the two programs, not of the
    data: random tokens would show it in a good part of the elements. The first and the last lane are compared, in all
    layers, for a first chunk and for one with context. Nothing is assumed of a platform: where bits differ, the wide
    program is not used.
    """
    rng, lanes = np.random.default_rng(0), {}
    enough = _ELEMENTS[state.pools[0].data.dtype.itemsize]
    for size, count in engine.wide_prefills:
        seen, same = 0, True
        for _ in range(_ROUNDS):
            batches = _probes(rng, engine, size, count, vocab)
            state, same, compared = _compare(prefill[size, count], prefill[size, 1], params, state, batches)
            seen += compared
            if not same or seen >= enough:
                break
        if same:
            lanes[size] = count
    return lanes, state


def _probes(rng: np.random.Generator, engine: ResolvedEngine, size: int, lanes: int, vocab: int) -> list[PrefillBatch]:
    """Random tokens in every lane, each of another length and with pages of its own: chunks at the start, and further
    on where the context has room."""
    tables = np.arange(lanes * engine.table_width, dtype=np.int32).reshape(lanes, -1)
    lengths = (size - np.arange(lanes) % size).astype(np.int32)
    room, later = engine.table_width * engine.page_size, engine.prefill_sizes[-1]
    return [
        PrefillBatch(
            rng.integers(vocab, size=(lanes, size), dtype=np.int32), np.full(lanes, start, np.int32), lengths, tables
        )
        for start in ([0, later] if later + size <= room else [0])
    ]


def _compare(
    wide: Prefill, narrow: Prefill, params: Any, state: StepState, batches: list[PrefillBatch]
) -> tuple[StepState, bool, int]:
    """Whether the narrow program leaves the bits of the wide one in the pages of the outer lanes, and in how many
    elements."""
    ends = (0, len(batches[0].starts) - 1)
    pages = np.concatenate([batches[0].tables[lane] for lane in ends])
    for batch in batches:
        state = wide(params, state, batch)
    want = _bits(state, pages)
    for batch in batches:
        for lane in ends:
            state = narrow(params, state, PrefillBatch(*(part[lane : lane + 1] for part in batch)))
    same = all(np.array_equal(a, b) for a, b in zip(want, _bits(state, pages), strict=True))
    return state, same, sum(part.size // state.pools[0].data.dtype.itemsize for part in want)


def _bits(state: StepState, pages: np.ndarray) -> list[np.ndarray]:
    """The bytes of these pages, one array a layer."""
    return [np.asarray(pool.data[pages]).view(np.uint8) for pool in state.pools]
