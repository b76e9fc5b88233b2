"""Shipped shapes of paged prefill for `python -m pallas_kernels.check`; `configurations` lists them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import Configuration, shaped
from pallas_kernels.paged_attention.hopper.prefill.launch import prefill
from pallas_kernels.paged_attention.options import AttentionOptions

_SEQUENCES, _KV_HEADS, _PAGES, _CONTEXT = 4, 8, 256, 8192


def _build(
    page: int,
    head_dim: int,
    group: int,
    *,
    chunk: int = 2048,
    dtype: Any = jnp.bfloat16,
    pool_dtype: Any = None,
    scales: str | None = None,
    sinks: bool = False,
    tree: bool = False,
    **options: Any,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    per_token = (page,) if scales == "token" else ()
    asked = AttentionOptions(
        head_dim**-0.5,
        sinks=shaped(_KV_HEADS * group, dtype=jnp.float32) if sinks else None,
        scales=None if scales is None else shaped(_PAGES, 2, _KV_HEADS, *per_token, dtype=jnp.float32),
        tree=shaped(_SEQUENCES, chunk, chunk, dtype=jnp.bool_) if tree else None,
        **options,
    )
    return prefill, (
        shaped(_SEQUENCES, chunk, _KV_HEADS * group, head_dim, dtype=dtype),
        shaped(_PAGES, 2, _KV_HEADS, page, head_dim, dtype=pool_dtype or dtype),
        shaped(_SEQUENCES, _CONTEXT // page, dtype=jnp.int32),
        shaped(_SEQUENCES, dtype=jnp.int32),
        shaped(_SEQUENCES, dtype=jnp.int32),
        asked,
    )


def _configuration(name: str, page: int, head_dim: int, group: int, **options: Any) -> Configuration:
    return Configuration(
        op="paged_attention.prefill",
        name=f"page{page}-dim{head_dim}-group{group}-{name}",
        build=functools.partial(_build, page, head_dim, group, **options),
    )


_EVERY: dict[str, Any] = {"window": 1024, "softcap": 30.0, "sinks": True}
_GEMMA: dict[str, Any] = {"window": 1024, "softcap": 30.0}

CONFIGURATIONS: tuple[Configuration, ...] = (
    _configuration("bf16", 16, 128, 4),
    _configuration("bf16", 64, 128, 4),
    _configuration("bf16", 64, 128, 7),
    _configuration("bf16", 128, 128, 8),
    _configuration("fp16", 64, 64, 8, dtype=jnp.float16),
    _configuration("bf16", 16, 80, 1),
    _configuration("bf16", 32, 96, 1),
    _configuration("bf16", 64, 256, 2),
    _configuration("bf16-window-softcap-sinks", 64, 128, 4, **_EVERY),
    _configuration("bf16-window-softcap", 64, 256, 2, **_GEMMA),
    _configuration("bf16-tree-window", 64, 128, 4, chunk=128, tree=True, window=1024),
    _configuration("int8-head", 64, 128, 4, pool_dtype=jnp.int8, scales="head"),
    _configuration("int8-token-window-softcap-sinks", 16, 128, 4, pool_dtype=jnp.int8, scales="token", **_EVERY),
    _configuration("fp8-head", 64, 128, 8, pool_dtype=jnp.float8_e4m3fn, scales="head"),
    _configuration("int8-token-window-softcap", 64, 256, 2, pool_dtype=jnp.int8, scales="token", **_GEMMA),
    _configuration("fp8-token", 16, 256, 8, pool_dtype=jnp.float8_e4m3fn, scales="token"),
    _configuration("fp8-token-tree", 64, 64, 8, chunk=64, pool_dtype=jnp.float8_e4m3fn, scales="token", tree=True),
)
