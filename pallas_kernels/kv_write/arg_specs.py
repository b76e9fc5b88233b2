"""Shapes of writes into the KV pool: layers of Llama-3.1-8B and others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import mosaic
from pallas_kernels.kv_write.reference import Written
from pallas_kernels.operands import Case, Draw
from pallas_kernels.specs import ADA, EVERYWHERE, HOPPER, SHORT, Spec, ints, shaped


@dataclasses.dataclass(frozen=True)
class Write(Spec):
    """New keys and values of ``sequences`` x ``chunk`` tokens.

    Attributes:
        label: what distinguishes it in its name.
        rotary: rotated numbers of a head; 0: keys and values are written without rotation.
        scales: "head", "token" or "".
        projected: queries, keys and values are in one array.
    """

    label: str
    sequences: int = 64
    chunk: int = 1
    page: int = 64
    kv_heads: int = 8
    heads: int = 32
    head_dim: int = 128
    rotary: int = 128
    interleaved: int = 0
    dtype: str = "bfloat16"
    pool: str = "bfloat16"
    scales: str = ""
    projected: int = 0

    op = "kv_write"

    def __str__(self) -> str:
        return f"kv_write, {self.sequences} x {self.chunk} tokens"

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, read and written, of 16 bits."""
        return 2 * 4 * self.sequences * self.chunk * self.kv_heads * self.head_dim

    def operands(self, draw: Draw) -> tuple[Any, ...]:
        """Draw the pool, keys and values, and their places, without scales and rotation."""
        pool, _, keys, values, pages, offsets, *_ = self.arguments()
        return trial_case(draw, pool, keys, values, pages, offsets).operands

    @property
    def name(self) -> str:
        return f"{self.label}-dim{self.head_dim}-{SHORT[self.pool]}"

    @property
    def targets(self) -> tuple[str, ...]:
        return (HOPPER, ADA) if self.pool == "float8_e4m3fn" else EVERYWHERE

    @property
    def donated(self) -> tuple[int, ...]:
        return (0, 1) if self.scales else (0,)

    @property
    def kernel(self) -> Callable[..., Any]:
        return self._write_projected if self.projected else self._write

    def _write(self, pool: jax.Array, scales: Any, k: jax.Array, v: jax.Array, *rest: Any) -> Written:
        pages, offsets, angles, q = rest
        rope = None if angles is None else (angles, angles)
        options: dict[str, Any] = {"scales": scales, "rope": rope, "interleaved": bool(self.interleaved), "q": q}
        return mosaic.write(pool, k, v, pages, offsets, **options)

    def _write_projected(self, pool: jax.Array, scales: Any, qkv: jax.Array, *rest: Any) -> Written:
        pages, offsets, angles = rest
        options: dict[str, Any] = {"scales": scales, "rope": (angles, angles), "interleaved": bool(self.interleaved)}
        return mosaic.write_projected(pool, qkv, pages, offsets, **options)

    def arguments(self) -> tuple[Any, ...]:
        pool = shaped(256, 2, self.kv_heads, self.page, self.head_dim, dtype=self.pool)
        rank = {"": 0, "head": 3, "token": 4}[self.scales]
        scales = shaped(*pool.shape[:rank], dtype="float32") if rank else None
        tokens, written = (self.sequences, self.chunk), -(-self.chunk // self.page) + (self.chunk > 1)
        angles = shaped(*tokens, self.rotary // 2, dtype="float32") if self.rotary else None
        places = ints(self.sequences, written), ints(self.sequences)
        if self.projected:
            parts = self.heads // self.kv_heads + 2
            qkv = shaped(*tokens, self.kv_heads, parts, self.head_dim, dtype=self.dtype)
            return pool, scales, qkv, *places, angles
        keys = shaped(*tokens, self.kv_heads, self.head_dim, dtype=self.dtype)
        queries = shaped(*tokens, self.heads, self.head_dim, dtype=self.dtype) if self.rotary else None
        return pool, scales, keys, keys, *places, angles, queries


SHIPPED = (
    Write("rows"),
    Write("rows-unrotated", rotary=0),
    Write("rows-one-head", kv_heads=1, heads=8),
    Write("rows", head_dim=64, rotary=64),
    Write("rows", head_dim=80, rotary=80, kv_heads=32),
    Write("rows", head_dim=256, rotary=256, kv_heads=4, heads=16),
    Write("rows-partial", head_dim=96, rotary=48),
    Write("rows-interleaved", interleaved=1),
    Write("rows", dtype="float16", pool="float16"),
    Write("pages", sequences=2, chunk=1024),
    Write("pages-page16", sequences=2, chunk=1024, page=16),
    Write("rows-token", pool="int8", scales="token"),
    Write("rows-token", pool="float8_e4m3fn", scales="token"),
    Write("rows-head", pool="float8_e4m3fn", scales="head"),
    Write("rows-projected", projected=1),
    Write("rows-projected", projected=1, head_dim=64, rotary=64, heads=56),
    Write("rows-projected-token", projected=1, pool="int8", scales="token"),
    Write("pages-projected", projected=1, sequences=2, chunk=1024),
    Write("pages-token", sequences=2, chunk=1024, pool="int8", scales="token"),
)


def trial_case(draw: Draw, pool: Any, *rest: Any, **options: Any) -> Case:
    """Make keys and values, or the output of a fused QKV projection, of chunks that share no page."""
    *tokens, pages, offsets = rest
    count = pages.size + 2
    rope = options.get("rope")
    angles = None if rope is None else draw.uniform(rope[0], -3.0, 3.0)
    given = {
        **options,
        "scales": draw.pool_scales(options.get("scales"), pool, count),
        "rope": None if angles is None else (jnp.cos(angles), jnp.sin(angles)),
        **({"q": draw.normal(options["q"])} if "q" in options else {}),
    }
    numbers = draw.normal(pool, first=count), *(draw.normal(each) for each in tokens)
    return Case((*numbers, draw.distinct(pages, count), draw.integers(offsets, 0, pool.shape[3])), given)
