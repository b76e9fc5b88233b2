"""Shipped shapes of paged decode for `python -m pallas_kernels.check`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.check.configuration import Configuration, shaped
from pallas_kernels.paged_attention.hopper.decode.launch import extend
from pallas_kernels.paged_attention.options import AttentionOptions

_ROWS, _KV_HEADS, _PAGES, _CONTEXT = 64, 8, 256, 4096


def _build(
    page: int,
    head_dim: int,
    group: int,
    *,
    chunk: int = 1,
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
        tree=shaped(_ROWS, chunk, chunk, dtype=jnp.bool_) if tree else None,
        **options,
    )
    return extend, (
        shaped(_ROWS, chunk, _KV_HEADS * group, head_dim, dtype=dtype),
        shaped(_PAGES, 2, _KV_HEADS, page, head_dim, dtype=pool_dtype or dtype),
        shaped(_ROWS, _CONTEXT // page, dtype=jnp.int32),
        shaped(_ROWS, dtype=jnp.int32),
        shaped(_ROWS, dtype=jnp.int32),
        asked,
    )


def _configuration(page: int, head_dim: int, group: int, more: str = "bf16", **options: Any) -> Configuration:
    return Configuration(
        op="paged_attention.decode",
        name=f"page{page}-dim{head_dim}-group{group}-{more}",
        build=functools.partial(_build, page, head_dim, group, **options),
    )


_INT8: dict[str, Any] = {"pool_dtype": jnp.int8}
_FP8: dict[str, Any] = {"pool_dtype": jnp.float8_e4m3fn}

# With JAX 0.11.2 these head_dims take the XLA path (`decode.refusal`).
_CLIPPED = (
    _configuration(16, 80, 1),
    _configuration(64, 96, 1),
    _configuration(64, 80, 1, "int8-head", **_INT8, scales="head"),
    _configuration(32, 96, 1, "fp8-token", **_FP8, scales="token"),
)

CONFIGURATIONS: tuple[Configuration, ...] = (
    _configuration(16, 128, 4),
    _configuration(64, 128, 4),
    _configuration(64, 128, 7),
    _configuration(128, 128, 8),
    _configuration(32, 128, 16),
    _configuration(64, 64, 8, "fp16", dtype=jnp.float16),
    _configuration(64, 256, 2, "bf16-window-softcap", window=4096, softcap=50.0),
    _configuration(64, 64, 8, "bf16-window-sinks", window=128, sinks=True),
    _configuration(64, 128, 4, "int8-head", **_INT8, scales="head"),
    _configuration(16, 128, 4, "fp8-head", **_FP8, scales="head"),
    _configuration(64, 128, 4, "fp8-token", **_FP8, scales="token"),
    _configuration(16, 128, 4, "int8-token", **_INT8, scales="token"),
    _configuration(64, 128, 4, "bf16-chunk4", chunk=4),
    _configuration(64, 128, 4, "bf16-chunk16", chunk=16),
    _configuration(64, 128, 4, "bf16-chunk8-tree", chunk=8, tree=True),
    *(_CLIPPED if compat.CLIPPED_STORES else ()),
)
