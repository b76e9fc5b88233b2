"""Shipped copies for `python -m pallas_kernels.check`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import ADA, AMPERE, HOPPER, Configuration, shaped
from pallas_kernels.kv_copy import mosaic


def _pool(page: int, head_dim: int, dtype: Any, scales: str | None) -> tuple[Any, ...]:
    if scales == "latent":  # two scales per token, no heads
        return shaped(256, page, head_dim, dtype=dtype), shaped(256, page, 2, dtype=jnp.float32)
    numbers = shaped(256, 2, 8, page, head_dim, dtype=dtype)
    rank = {None: 0, "head": 3, "token": 4}[scales]
    return (numbers, shaped(*numbers.shape[:rank], dtype=jnp.float32)) if rank else (numbers,)


def _copy_pages(copies: int, *pool: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return mosaic.copy_pages, (_pool(*pool), *(shaped(copies, dtype=jnp.int32) for _ in range(2)))


def _move_rows(moves: int, *pool: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return mosaic.move_rows, (_pool(*pool), *(shaped(moves, dtype=jnp.int32) for _ in range(4)))


def _configuration(
    build: Callable[..., Any], count: int, page: int, dim: int, dtype: Any, scales: Any
) -> Configuration:
    op = f"kv_copy.{build.__name__.removeprefix('_')}"
    name = f"{count}-page{page}-dim{dim}-{jnp.dtype(dtype).name}" + (f"-{scales}" if scales else "")
    targets = (HOPPER, AMPERE, ADA)
    return Configuration(op, name, functools.partial(build, count, page, dim, dtype, scales), targets, donated=(0,))


CONFIGURATIONS: tuple[Configuration, ...] = tuple(
    _configuration(*one)
    for one in (
        (_copy_pages, 8, 64, 128, jnp.bfloat16, None),
        (_copy_pages, 64, 64, 128, jnp.bfloat16, None),
        (_copy_pages, 8, 16, 80, jnp.float16, None),
        (_copy_pages, 8, 64, 128, jnp.int8, "token"),
        (_copy_pages, 64, 16, 128, jnp.float8_e4m3fn, "head"),
        (_copy_pages, 8, 64, 576, jnp.int8, "latent"),
        (_move_rows, 8, 64, 128, jnp.bfloat16, None),
        (_move_rows, 128, 64, 128, jnp.bfloat16, None),
        (_move_rows, 64, 64, 128, jnp.int8, "token"),
    )
)
