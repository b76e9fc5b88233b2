"""Shipped shapes of linear attention for `python -m pallas_kernels.check`: Qwen3-Next, Mamba-2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import ADA, AMPERE, HOPPER, Configuration, shaped
from pallas_kernels.linear_attention.mosaic import decode, prefill

_SHORT = {jnp.bfloat16: "bf16", jnp.float16: "fp16", jnp.float32: "fp32"}
_STATES = 256


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Heads and sizes of a model's layers."""

    name: str
    k_heads: int
    heads: int
    key: int
    value: int
    delta: bool  # the delta rule: has beta

    def operands(self, lead: tuple[int, ...], dtype: Any, values: Any) -> tuple[Any, ...]:
        queries = shaped(*lead, self.k_heads, self.key, dtype=dtype)
        gate = shaped(*lead, self.heads, dtype=jnp.float32)
        pool = shaped(_STATES, self.heads, self.key, self.value, dtype=jnp.float32)
        beta = gate if self.delta else None
        return queries, queries, shaped(*lead, self.heads, self.value, dtype=values), gate, beta, pool


QWEN, MAMBA = _Layer("qwen3-next", 16, 32, 128, 128, True), _Layer("mamba-2", 8, 128, 128, 64, False)
SMALL, FALCON = _Layer("small", 2, 6, 48, 80, True), _Layer("falcon-h1", 1, 24, 256, 64, False)


def _decode(layer: _Layer, rows: int, dtype: Any, values: Any = None) -> Configuration:
    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        places = shaped(rows, dtype=jnp.int32)
        return decode.decode, (*layer.operands((rows,), dtype, values or dtype), places, places)

    name = f"{layer.name}-{rows}-{_SHORT[dtype]}" + (f"-{_SHORT[values]}" if values else "")
    return Configuration("linear_attention.decode", name, build, (HOPPER, AMPERE, ADA), donated=(5,))


def _prefill(layer: _Layer, lead: tuple[int, int], dtype: Any, values: Any = None, size: int = 64) -> Configuration:
    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        places = shaped(lead[0], dtype=jnp.int32), shaped(lead[0], lead[1] // size, dtype=jnp.int32)
        return prefill.prefill, (*layer.operands(lead, dtype, values or dtype), *places)

    name = f"{layer.name}-{lead[0]}x{lead[1]}-{_SHORT[dtype]}" + (f"-{_SHORT[values]}" if values else "")
    return Configuration("linear_attention.prefill", name, build, (HOPPER, AMPERE, ADA), donated=(5,))


CONFIGURATIONS: tuple[Configuration, ...] = (
    _decode(QWEN, 64, jnp.bfloat16),
    _decode(QWEN, 64, jnp.float32),
    _decode(MAMBA, 64, jnp.bfloat16, jnp.float32),
    _decode(FALCON, 1, jnp.float32),
    _decode(SMALL, 1, jnp.float16),
    _prefill(QWEN, (1, 1024), jnp.bfloat16),
    _prefill(QWEN, (1, 1024), jnp.float32),
    _prefill(QWEN, (8, 256), jnp.bfloat16),
    _prefill(QWEN, (8, 256), jnp.float32),
    _prefill(MAMBA, (1, 512), jnp.bfloat16, jnp.float32),
    _prefill(MAMBA, (4, 512), jnp.bfloat16, jnp.float32),
    _prefill(FALCON, (4, 512), jnp.bfloat16),
)
