"""Shipped writes for `python -m pallas_kernels.check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.check.configuration import ADA, AMPERE, HOPPER, Configuration, shaped
from pallas_kernels.kv_write import mosaic
from pallas_kernels.kv_write.reference import Written

_EVERYWHERE = (HOPPER, AMPERE, ADA)
_SHORT = {jnp.bfloat16: "bf16", jnp.float16: "fp16", jnp.int8: "int8", jnp.float8_e4m3fn: "fp8"}


@dataclasses.dataclass(frozen=True)
class _Write:
    name: str
    sequences: int = 64
    chunk: int = 1
    page: int = 64
    kv_heads: int = 8
    heads: int = 32
    head_dim: int = 128
    rotary: int = 128  # rotated numbers of a head; 0: keys and values are written without rotation
    interleaved: bool = False
    dtype: Any = jnp.bfloat16
    pool_dtype: Any = jnp.bfloat16
    scales: str | None = None
    projected: bool = False  # queries, keys and values in one array

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        pool = shaped(256, 2, self.kv_heads, self.page, self.head_dim, dtype=self.pool_dtype)
        rank = {None: 0, "head": 3, "token": 4}[self.scales]
        scales = shaped(*pool.shape[:rank], dtype=jnp.float32) if rank else None
        tokens, written = (self.sequences, self.chunk), -(-self.chunk // self.page) + (self.chunk > 1)
        keys = shaped(*tokens, self.kv_heads, self.head_dim, dtype=self.dtype)
        queries = shaped(*tokens, self.heads, self.head_dim, dtype=self.dtype) if self.rotary else None
        angles = shaped(*tokens, self.rotary // 2, dtype=jnp.float32) if self.rotary else None
        places = shaped(self.sequences, written, dtype=jnp.int32), shaped(self.sequences, dtype=jnp.int32)

        def write(pool: jax.Array, scales: jax.Array | None, k: jax.Array, v: jax.Array, *rest: Any) -> Written:
            pages, offsets, angles, q = rest
            rope = None if angles is None else (angles, angles)
            options: dict[str, Any] = {"scales": scales, "rope": rope, "interleaved": self.interleaved, "q": q}
            return mosaic.write(pool, k, v, pages, offsets, **options)

        def write_projected(pool: jax.Array, scales: jax.Array | None, qkv: jax.Array, *rest: Any) -> Written:
            pages, offsets, angles = rest
            options: dict[str, Any] = {"scales": scales, "rope": (angles, angles), "interleaved": self.interleaved}
            return mosaic.write_projected(pool, qkv, pages, offsets, **options)

        if self.projected:
            parts = self.heads // self.kv_heads + 2
            return write_projected, (
                pool,
                scales,
                shaped(*keys.shape[:3], parts, self.head_dim, dtype=self.dtype),
                *places,
                angles,
            )
        return write, (pool, scales, keys, keys, *places, angles, queries)

    def configuration(self) -> Configuration:
        targets = (HOPPER, ADA) if self.pool_dtype == jnp.float8_e4m3fn else _EVERYWHERE
        name = f"{self.name}-dim{self.head_dim}-{_SHORT[self.pool_dtype]}"
        return Configuration("kv_write", name, self.build, targets, donated=(0, 1) if self.scales else (0,))


CONFIGURATIONS: tuple[Configuration, ...] = tuple(
    one.configuration()
    for one in (
        _Write("rows"),
        _Write("rows-unrotated", rotary=0),
        _Write("rows-one-head", kv_heads=1, heads=8),
        _Write("rows", head_dim=64, rotary=64),
        _Write("rows", head_dim=80, rotary=80, kv_heads=32),
        _Write("rows", head_dim=256, rotary=256, kv_heads=4, heads=16),
        _Write("rows-partial", head_dim=96, rotary=48),
        _Write("rows-interleaved", interleaved=True),
        _Write("rows", dtype=jnp.float16, pool_dtype=jnp.float16),
        _Write("pages", sequences=2, chunk=1024),
        _Write("pages-page16", sequences=2, chunk=1024, page=16),
        _Write("rows-token", pool_dtype=jnp.int8, scales="token"),
        _Write("rows-token", pool_dtype=jnp.float8_e4m3fn, scales="token"),
        _Write("rows-head", pool_dtype=jnp.float8_e4m3fn, scales="head"),
        _Write("rows-projected", projected=True),
        _Write("rows-projected", projected=True, head_dim=64, rotary=64, heads=56),
        _Write("rows-projected-token", projected=True, pool_dtype=jnp.int8, scales="token"),
        _Write("pages-projected", projected=True, sequences=2, chunk=1024),
        _Write("pages-token", sequences=2, chunk=1024, pool_dtype=jnp.int8, scales="token"),
    )
)
