"""The shapes of paged decode that ship, for `python -m pallas_kernels.check`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import Configuration, shaped
from pallas_kernels.paged_attention.mosaic.decode import decode

_ROWS, _KV_HEADS, _PAGES, _CONTEXT = 64, 8, 256, 4096


def _decode(page: int, head_dim: int, group: int, dtype: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return functools.partial(decode, scale=head_dim**-0.5), (
        shaped(_ROWS, _KV_HEADS * group, head_dim, dtype=dtype),
        shaped(_PAGES, 2, _KV_HEADS, page, head_dim, dtype=dtype),
        shaped(_ROWS, _CONTEXT // page, dtype=jnp.int32),
        shaped(_ROWS, dtype=jnp.int32),
    )


def _configuration(page: int, head_dim: int, group: int, dtype: Any, short: str) -> Configuration:
    return Configuration(
        op="paged_attention.decode",
        name=f"page{page}-dim{head_dim}-group{group}-{short}",
        build=functools.partial(_decode, page, head_dim, group, dtype),
    )


CONFIGURATIONS: tuple[Configuration, ...] = (
    *(
        _configuration(page, head_dim, group, jnp.bfloat16, "bf16")
        for page in (16, 64)
        for head_dim, group in ((64, 1), (64, 8), (128, 4), (128, 7), (128, 8))
    ),
    _configuration(64, 128, 4, jnp.float16, "fp16"),
    _configuration(16, 64, 1, jnp.float16, "fp16"),
)
