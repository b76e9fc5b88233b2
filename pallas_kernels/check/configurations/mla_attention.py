"""Shipped shapes of MLA for `python -m pallas_kernels.check`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import Configuration, shaped
from pallas_kernels.mla_attention.mosaic import attention
from pallas_kernels.mla_attention.options import RANK, LatentOptions

_ROPE, _PAGES, _CONTEXT = 64, 256, 4096
_SHORT = {jnp.bfloat16: "bf16", jnp.float16: "fp16"}


def _build(
    entry: Callable[..., Any], page: int, heads: int, chunk: int, sequences: int, dtype: Any, context: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    queries = (sequences, heads) if entry is attention.decode else (sequences, chunk, heads)
    middle = () if entry is attention.decode else (shaped(sequences, dtype=jnp.int32),)
    return functools.partial(entry, options=LatentOptions(192**-0.5)), (
        shaped(*queries, RANK + _ROPE, dtype=dtype),
        shaped(_PAGES, page, RANK + _ROPE, dtype=dtype),
        shaped(sequences, context // page, dtype=jnp.int32),
        *middle,
        shaped(sequences, dtype=jnp.int32),
    )


def _configuration(
    entry: Callable[..., Any],
    page: int,
    heads: int,
    *,
    chunk: int = 1,
    sequences: int = 64,
    dtype: Any = jnp.bfloat16,
    context: int = _CONTEXT,
) -> Configuration:
    name = f"page{page}-heads{heads}-chunk{chunk}-context{context}-{_SHORT[dtype]}"
    build = functools.partial(_build, entry, page, heads, chunk, sequences, dtype, context)
    return Configuration(f"mla_attention.{entry.__name__}", name, build)


CONFIGURATIONS: tuple[Configuration, ...] = (
    *(_configuration(attention.decode, page, heads) for page in (16, 64) for heads in (16, 128)),
    _configuration(attention.decode, 32, 8),
    _configuration(attention.decode, 128, 32, dtype=jnp.float16),
    _configuration(attention.decode, 64, 16, context=512),  # one split: no merge
    _configuration(attention.extend, 64, 16, chunk=4),
    _configuration(attention.extend, 64, 128, chunk=2),
    _configuration(attention.prefill, 64, 16, chunk=1024, sequences=2),
    _configuration(attention.prefill, 64, 128, chunk=1024, sequences=2),
    _configuration(attention.prefill, 16, 24, chunk=256, sequences=2),
)
