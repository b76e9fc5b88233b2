"""Shipped products for `python -m pallas_kernels.check`: layers of Llama-3.1-8B and smaller models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels import rates
from pallas_kernels.check.configuration import H200, HOPPER, Configuration, shaped
from pallas_kernels.matmul.mosaic import launch
from pallas_kernels.matmul.types import Extras, Layout

_SHORT = {
    jnp.bfloat16: "bf16",
    jnp.float16: "fp16",
    jnp.float32: "f32",
    jnp.int8: "int8",
    jnp.float8_e4m3fn: "fp8",
}
FP16, FP8, INT8 = jnp.float16, jnp.float8_e4m3fn, jnp.int8


@dataclasses.dataclass(frozen=True)
class _Product:
    rows: int
    inputs: int = 4096
    outputs: int = 4096
    layout: Layout = "in first"
    gated: bool = False
    dtype: Any = jnp.bfloat16
    result: Any = jnp.bfloat16
    bias: bool = False
    residual: bool = False

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        outputs = (2, self.outputs) if self.gated else (self.outputs,)
        weights = (self.inputs, *outputs) if self.layout == "in first" else (*outputs, self.inputs)
        scaled = self.dtype in launch.NARROW
        extras = Extras(
            x_scales=shaped(self.rows, dtype=jnp.float32) if scaled else None,
            scales=shaped(*outputs, dtype=jnp.float32) if scaled else None,
            bias=shaped(*outputs, dtype=self.result) if self.bias else None,
            residual=shaped(self.rows, self.outputs, dtype=self.result) if self.residual else None,
        )
        function = functools.partial(launch.matmul, **self._options)
        return function, (
            shaped(self.rows, self.inputs, dtype=self.dtype),
            shaped(*weights, dtype=self.dtype),
            extras,
        )

    @property
    def _options(self) -> dict[str, Any]:
        return {"layout": self.layout, "gated": self.gated, "dtype": self.result}

    def tiles(self, device_kind: str) -> launch.Tiles:
        """Return the tiles that the heuristic chooses on this device."""
        return launch.heuristic_tiles(*self.build()[1], **self._options, rates=rates.rates_of(device_kind))

    @property
    def differs(self) -> bool:
        return self.tiles(rates.H100) != self.tiles(rates.H200)

    def configuration(self, *targets: str) -> Configuration:
        """Return the configuration; without ``targets`` for an H100, and for an H200 where its tiles differ."""
        sizes = f"{self.inputs}x{'2x' if self.gated else ''}{self.outputs}-{self.layout.replace(' ', '-')}"
        after = "".join(f"-{name}" for name in ("gated", "bias", "residual") if getattr(self, name))
        result = "" if self.result == jnp.bfloat16 else f"-to-{_SHORT[self.result]}"
        name = f"{sizes}-rows{self.rows}-{_SHORT[self.dtype]}{result}{after}"
        return Configuration("matmul", name, self.build, targets or (HOPPER, *[H200] * self.differs))


def _layer(rows: int) -> tuple[_Product, ...]:
    """Return the products of Llama-3.1-8B in jaxinfer: QKV, output, gate with up, down, LM head."""
    return (
        _Product(rows, 4096, 6144),
        _Product(rows, 4096, 4096, residual=True),
        _Product(rows, 4096, 14336, "in last", gated=True),
        _Product(rows, 14336, 4096, residual=True),
        _Product(rows, 4096, 128256, "in last"),
    )


def _narrow(rows: int, dtype: Any) -> tuple[_Product, ...]:
    return (
        _Product(rows, 4096, 6144, "in last", dtype=dtype),
        _Product(rows, 4096, 14336, "in last", gated=True, dtype=dtype),
        _Product(rows, 14336, 4096, "in last", dtype=dtype, residual=True),
    )


# Row counts of decode programs that are not among `CONFIGURATIONS`.
_H200_ROWS = (2, 16, 32, 128, 512)
_OF_H200 = tuple(one.configuration(H200) for rows in _H200_ROWS for one in _layer(rows) if one.differs)
CONFIGURATIONS: tuple[Configuration, ...] = _OF_H200 + tuple(
    one.configuration()
    for one in (
        *(product for rows in (1, 8, 64, 256, 2048, 8192) for product in _layer(rows)),
        *(product for dtype in (FP8, INT8) for rows in (8, 256, 8192) for product in _narrow(rows, dtype)),
        # Other epilogues, layouts and dtypes.
        _Product(64, 3584, 4608, "in last", bias=True),
        _Product(64, 896, 1152, bias=True),
        _Product(2048, 896, 1152, "in last", bias=True, residual=True),
        _Product(20, 896, 1184, residual=True),
        _Product(333, 896, 1168, "in last", bias=True, residual=True),
        _Product(3, 896, 1168, "in last", gated=True, residual=True),
        _Product(512, 896, 4864, "in last", gated=True, bias=True),
        _Product(64, 4096, 14336, gated=True),
        _Product(2048, 4096, 14336, gated=True),
        _Product(16, 4096, 6144, dtype=FP16, result=FP16),
        _Product(2048, 14336, 4096, dtype=FP16, result=FP16, residual=True),
        _Product(64, 4096, 128256, "in last", result=jnp.float32),
        _Product(2048, 4096, 6144, "in last", dtype=FP8, result=FP16, bias=True),
        _Product(2048, 4096, 6144, "in last", dtype=INT8, result=jnp.float32),
    )
)
