"""Shapes of copies within the KV pool of a layer of Llama-3.1-8B and others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.kv_copy import mosaic
from pallas_kernels.operands import Case, Draw
from pallas_kernels.specs import EVERYWHERE, Spec, ints, shaped


@dataclasses.dataclass(frozen=True)
class Copy(Spec):
    """Copies of pages, or moves of tokens with ``rows``. ``scales``: "head", "token", "latent" (no heads) or ""."""

    count: int
    page: int = 64
    head_dim: int = 128
    dtype: str = "bfloat16"
    scales: str = ""
    rows: int = 0
    kv_heads: int = 8

    donated = (0,)
    targets = EVERYWHERE

    def __str__(self) -> str:
        return f"kv_copy, {self.count} pages of {self.page}"

    @property
    def bytes(self) -> int:
        """Bytes of pages, read and written, of 16 bits."""
        return 2 * 4 * self.count * self.page * self.kv_heads * self.head_dim

    def operands(self, draw: Draw) -> tuple[Any, ...]:
        return trial_case(draw, *self.arguments()).operands

    @property
    def op(self) -> str:
        return f"kv_copy.{self.kernel.__name__}"

    @property
    def name(self) -> str:
        scales = f"-{self.scales}" if self.scales else ""
        return f"{self.count}-page{self.page}-dim{self.head_dim}-{self.dtype}{scales}"

    @property
    def kernel(self) -> Callable[..., Any]:
        return mosaic.move_rows if self.rows else mosaic.copy_pages

    def arguments(self) -> tuple[Any, ...]:
        return self._pool(), *(ints(self.count) for _ in range(4 if self.rows else 2))

    def _pool(self) -> tuple[Any, ...]:
        if self.scales == "latent":  # two scales per token
            shape = (256, self.page)
            return shaped(*shape, self.head_dim, dtype=self.dtype), shaped(*shape, 2, dtype="float32")
        numbers = shaped(256, 2, self.kv_heads, self.page, self.head_dim, dtype=self.dtype)
        rank = {"": 0, "head": 3, "token": 4}[self.scales]
        return (numbers, shaped(*numbers.shape[:rank], dtype="float32")) if rank else (numbers,)


SHIPPED = (
    Copy(8),
    Copy(64),
    Copy(8, page=16, head_dim=80, dtype="float16"),
    Copy(8, dtype="int8", scales="token"),
    Copy(64, page=16, dtype="float8_e4m3fn", scales="head"),
    Copy(8, head_dim=576, dtype="int8", scales="latent"),
    Copy(8, rows=1),
    Copy(128, rows=1),
    Copy(64, dtype="int8", scales="token", rows=1),
)


def trial_case(draw: Draw, pool: Any, *places: Any) -> Case:
    """Make copies of pages (source, target), or of tokens (source pages and slots, target pages and slots)."""
    leaf, moves = jax.tree.leaves(pool)[0], places[0]
    count, slots = 2 * moves.size + 2, leaf.shape[3] if len(places) == 4 else 1
    targets = draw.distinct(moves, count * slots)
    at: tuple[Any, ...]
    if len(places) == 2:
        at = draw.integers(moves, 0, count), targets
    else:
        at = draw.integers(moves, 0, count), draw.integers(moves, 0, slots), targets // slots, targets % slots
    return Case((jax.tree.map(lambda each: draw.normal(each, first=count), pool), *at))
