"""Shipped shapes of paged attention below Hopper for `python -m pallas_kernels.check`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import ADA, AMPERE, Configuration, shaped
from pallas_kernels.paged_attention.ampere.launch import decode, extend
from pallas_kernels.paged_attention.options import AttentionOptions

_ROWS, _KV_HEADS, _PAGES, _CONTEXT = 64, 8, 256, 4096


def _build(
    page: int,
    head_dim: int,
    group: int,
    *,
    sequences: int = _ROWS,
    chunk: int = 1,
    dtype: Any = jnp.bfloat16,
    sinks: bool = False,
    tree: bool = False,
    **options: Any,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def attend(q: Any, pool: Any, tables: Any, starts: Any, lengths: Any, asked: AttentionOptions) -> Any:
        if chunk == 1:
            return decode(q[:, 0], pool, tables, lengths, asked)
        return extend(q, pool, tables, starts, lengths, asked)

    return attend, (
        shaped(sequences, chunk, _KV_HEADS * group, head_dim, dtype=dtype),
        shaped(_PAGES, 2, _KV_HEADS, page, head_dim, dtype=dtype),
        shaped(sequences, _CONTEXT // page, dtype=jnp.int32),
        shaped(sequences, dtype=jnp.int32),
        shaped(sequences, dtype=jnp.int32),
        AttentionOptions(
            head_dim**-0.5,
            sinks=shaped(_KV_HEADS * group, dtype=jnp.float32) if sinks else None,
            tree=shaped(sequences, chunk, chunk, dtype=jnp.bool_) if tree else None,
            **options,
        ),
    )


def _configuration(page: int, head_dim: int, group: int, more: str = "bf16", **options: Any) -> Configuration:
    return Configuration(
        op="paged_attention.ampere",
        name=f"page{page}-dim{head_dim}-group{group}-{more}",
        build=functools.partial(_build, page, head_dim, group, **options),
        targets=(AMPERE, ADA),
    )


_EVERY: dict[str, Any] = {"window": 1024, "softcap": 30.0, "sinks": True}

CONFIGURATIONS: tuple[Configuration, ...] = (
    _configuration(64, 128, 4),
    _configuration(16, 128, 4),
    _configuration(128, 128, 8),
    _configuration(64, 128, 7),
    _configuration(64, 128, 16),
    _configuration(32, 128, 32),
    _configuration(64, 64, 8, "fp16", dtype=jnp.float16),
    _configuration(32, 64, 1),
    _configuration(64, 64, 8, "bf16-window-sinks", window=128, sinks=True),
    _configuration(64, 128, 2, "bf16-window-softcap", window=4096, softcap=50.0),
    _configuration(64, 128, 4, "bf16-chunk4", chunk=4),
    _configuration(64, 128, 4, "bf16-chunk8-tree", chunk=8, tree=True),
    _configuration(64, 128, 4, "bf16-chunk512", sequences=2, chunk=512),
    _configuration(16, 128, 7, "fp16-chunk512", sequences=2, chunk=512, dtype=jnp.float16),
    _configuration(32, 64, 8, "bf16-chunk512", sequences=2, chunk=512),
    _configuration(64, 128, 1, "bf16-chunk512-window-softcap-sinks", sequences=2, chunk=512, **_EVERY),
)
