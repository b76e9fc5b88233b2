"""Shipped products for `python -m pallas_kernels.check`: layers of Llama-3.1-8B, smaller models and mixtures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import Configuration, shaped
from pallas_kernels.check.configurations.grouped_matmul import unfilled
from pallas_kernels.quant_matmul.mosaic import launch

_SHORT = {
    jnp.bfloat16: "bf16",
    jnp.float16: "fp16",
    jnp.float32: "f32",
    jnp.int4: "int4",
    jnp.int8: "int8",
    jnp.uint8: "powers",
    jnp.float8_e4m3fn: "fp8",
}


@dataclasses.dataclass(frozen=True)
class _Product:
    rows: int
    channels: int = 4096
    inputs: int = 4096
    group: int | None = 128  # None: a scale per channel
    weight_dtype: Any = jnp.int4
    dtype: Any = jnp.bfloat16
    scale_dtype: Any = jnp.bfloat16
    zeros: bool = False
    e2m1: bool = False

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        factors = (self.channels,) if self.group is None else (self.inputs // self.group, self.channels)
        arguments = (
            shaped(self.rows, self.inputs, dtype=self.dtype),
            shaped(self.channels, self.inputs, dtype=self.weight_dtype),
            shaped(*factors, dtype=self.scale_dtype),
            shaped(*factors, dtype=jnp.int8) if self.zeros else None,
        )
        return functools.partial(launch.matmul, e2m1=self.e2m1), arguments

    def configuration(self) -> Configuration:
        kind = "channel" if self.group is None else f"group{self.group}"
        numbers = (
            f"{'mxfp4' if self.e2m1 else _SHORT[self.weight_dtype]}-{_SHORT[self.dtype]}-{_SHORT[self.scale_dtype]}"
        )
        zeros = "-zeros" if self.zeros else ""
        name = f"{self.channels}x{self.inputs}-rows{self.rows}-{numbers}-{kind}{zeros}"
        return Configuration("quant_matmul", name, self.build)


@dataclasses.dataclass(frozen=True)
class _Experts(_Product):
    """A product of ``tiles`` with ``rows`` each."""

    tiles: int = 8
    experts: int = 8

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        factors = (self.inputs // (self.group or self.inputs), self.experts, self.channels)
        arguments = (
            shaped(self.tiles, self.rows, self.inputs, dtype=self.dtype),
            shaped(self.experts, self.channels, self.inputs, dtype=self.weight_dtype),
            shaped(*factors, dtype=self.scale_dtype),
            shaped(*factors, dtype=jnp.int8) if self.zeros else None,
            shaped(self.tiles, dtype=jnp.int32),
            shaped(dtype=jnp.int32),
        )
        return self._multiply, arguments

    def _multiply(self, x: Any, weights: Any, scales: Any, zeros: Any, experts: Any, occupied: Any) -> Any:
        return launch.matmul_tiles(x, weights, scales, zeros, unfilled(x, experts, occupied), e2m1=self.e2m1)

    def configuration(self) -> Configuration:
        whole = super().configuration()
        return dataclasses.replace(whole, name=f"{self.tiles}tiles-{self.experts}experts-{whole.name}")


_MXFP4: dict[str, Any] = {"group": 32, "scale_dtype": jnp.uint8, "e2m1": True}
_GPT_OSS: dict[str, Any] = {**_MXFP4, "experts": 32, "inputs": 2880}

CONFIGURATIONS: tuple[Configuration, ...] = tuple(
    one.configuration()
    for one in (
        _Product(1),
        _Product(16),
        _Product(16, zeros=True),
        _Product(32, channels=28672),
        _Product(32, channels=28672, zeros=True),
        _Product(56, channels=28672),
        _Product(56, channels=28672, zeros=True),
        _Product(56, channels=28672, dtype=jnp.float16, scale_dtype=jnp.float16, zeros=True),
        _Product(56, channels=28672, **_MXFP4),
        _Product(64, channels=6144, zeros=True),
        _Product(64, channels=6144, **_MXFP4),
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
        _Product(128),
        _Product(256),
        _Product(2048),
        _Product(2048, channels=28672, zeros=True),
        _Product(2048, channels=28672, group=32),
        _Product(4096, inputs=14336),
        _Product(4096, inputs=14336, dtype=jnp.float16, scale_dtype=jnp.float16, zeros=True),
        _Product(2048, channels=896, inputs=4864, group=64),
        _Product(2048, weight_dtype=jnp.int8, zeros=True),
        _Product(2048, channels=28672, weight_dtype=jnp.float8_e4m3fn, scale_dtype=jnp.float32),
        _Product(16, group=32, scale_dtype=jnp.float16),
        _Product(16, weight_dtype=jnp.int8, group=32, scale_dtype=jnp.float16),
        _Product(64, channels=28672, weight_dtype=jnp.int8, group=32, zeros=True),
        _Product(16, weight_dtype=jnp.int8, channels=192, zeros=True),
        _Product(2048, channels=192, zeros=True),
        _Product(16, channels=192, zeros=True),
        _Product(16, **_MXFP4),
        _Product(64, channels=28672, **_MXFP4),
        _Product(2048, channels=28672, **_MXFP4),
        _Experts(8, channels=28672, tiles=8),
        _Experts(56, channels=28672, tiles=40, zeros=True),
        _Experts(64, channels=28672, tiles=40, zeros=True),
        _Experts(64, channels=1536, tiles=40, zeros=True),
        _Experts(128, inputs=14336, tiles=40),
        _Experts(128, inputs=14336, tiles=40, weight_dtype=jnp.float8_e4m3fn, scale_dtype=jnp.float32),
        _Experts(8, channels=5760, tiles=32, **_GPT_OSS),
        _Experts(16, channels=2880, tiles=32, **_GPT_OSS),
        _Experts(64, channels=2880, tiles=96, **_GPT_OSS),
        _Experts(128, channels=5760, tiles=96, **_GPT_OSS),
        _Experts(128, channels=2880, tiles=96, **_GPT_OSS),
        _Experts(8, channels=2880, tiles=32, **{**_GPT_OSS, "inputs": 1440}),
        _Experts(128, channels=2880, tiles=96, **{**_GPT_OSS, "inputs": 1440}),
    )
)
