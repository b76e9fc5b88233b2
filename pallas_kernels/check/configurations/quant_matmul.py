"""The products that ship, for `python -m pallas_kernels.check`: layers of Llama-3.1-8B and smaller models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import Configuration, shaped
from pallas_kernels.quant_matmul import mosaic

_SHORT = {
    jnp.bfloat16: "bf16",
    jnp.float16: "fp16",
    jnp.float32: "f32",
    jnp.int4: "int4",
    jnp.int8: "int8",
    jnp.float8_e4m3fn: "fp8",
}


@dataclasses.dataclass(frozen=True)
class _Product:
    rows: int
    channels: int = 4096
    inputs: int = 4096
    group: int | None = 128  # None: a scale a channel
    weight_dtype: Any = jnp.int4
    dtype: Any = jnp.bfloat16
    scale_dtype: Any = jnp.bfloat16
    zeros: bool = False

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        factors = (self.channels,) if self.group is None else (self.inputs // self.group, self.channels)
        arguments = (
            shaped(self.rows, self.inputs, dtype=self.dtype),
            shaped(self.channels, self.inputs, dtype=self.weight_dtype),
            shaped(*factors, dtype=self.scale_dtype),
            shaped(*factors, dtype=jnp.int8) if self.zeros else None,
        )
        return mosaic.matmul, arguments

    def configuration(self) -> Configuration:
        kind = "channel" if self.group is None else f"group{self.group}"
        numbers = f"{_SHORT[self.weight_dtype]}-{_SHORT[self.dtype]}-{_SHORT[self.scale_dtype]}"
        zeros = "-zeros" if self.zeros else ""
        name = f"{self.channels}x{self.inputs}-rows{self.rows}-{numbers}-{kind}{zeros}"
        return Configuration("quant_matmul", name, self.build)


CONFIGURATIONS: tuple[Configuration, ...] = tuple(
    one.configuration()
    for one in (
        _Product(1),
        _Product(16),
        _Product(16, zeros=True),
        _Product(32, channels=28672),
        _Product(32, channels=28672, zeros=True),
        _Product(64, channels=28672),
        _Product(64, channels=28672, zeros=True),
        _Product(64, channels=28672, dtype=jnp.float16, scale_dtype=jnp.float16, zeros=True),
        _Product(64, channels=28672, weight_dtype=jnp.int8, zeros=True),
        _Product(64, channels=28672, weight_dtype=jnp.float8_e4m3fn, scale_dtype=jnp.float32),
        _Product(64, zeros=True),
        _Product(16, channels=6144),
        _Product(16, inputs=14336),
        _Product(16, channels=14336, scale_dtype=jnp.float32),
        _Product(16, channels=1536, inputs=8960),
        _Product(16, channels=896, inputs=4864, group=64),
        _Product(16, inputs=11008 + 128),
        _Product(16, dtype=jnp.float16, scale_dtype=jnp.float16, zeros=True),
        _Product(64, dtype=jnp.float16, scale_dtype=jnp.float16),
        _Product(16, weight_dtype=jnp.int8),
        _Product(64, weight_dtype=jnp.int8, zeros=True),
        _Product(16, weight_dtype=jnp.int8, group=None, scale_dtype=jnp.float32),
        _Product(16, weight_dtype=jnp.int8, group=None, dtype=jnp.float16, scale_dtype=jnp.float32),
        _Product(16, weight_dtype=jnp.float8_e4m3fn, group=None, scale_dtype=jnp.float32),
        _Product(64, weight_dtype=jnp.float8_e4m3fn, group=128, scale_dtype=jnp.float32),
    )
)
