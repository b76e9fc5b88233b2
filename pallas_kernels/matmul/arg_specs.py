"""Shapes of dense products: layers of Llama-3.1-8B and smaller models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from pallas_kernels import rates
from pallas_kernels.matmul.mosaic import launch
from pallas_kernels.matmul.tile_keys import MATMUL, matmul_key
from pallas_kernels.matmul.types import COLUMNS, CONSUMERS, GROUP, TOGETHER, Extras
from pallas_kernels.operands import Case, Draw, operand_sets, sets_beyond_cache
from pallas_kernels.specs import H200, HOPPER, SHORT, Problem, Spec, Tunable, shaped

_SHORT = {**SHORT, "float32": "f32"}
_MOST_GROUPS = 32  # groups of rows per consumer of a CTA


@dataclasses.dataclass(frozen=True)
class Product(Spec):
    """A layer's product.

    Attributes:
        last: weights are [out, in].
        gated: with gate and up, ``columns`` each.
        result: dtype of the result.
    """

    rows: int = 64
    inputs: int = 4096
    columns: int = 6144
    last: int = 0
    gated: int = 0
    dtype: str = "bfloat16"
    result: str = "bfloat16"
    bias: int = 0
    residual: int = 0

    op = "matmul"

    def __str__(self) -> str:
        return f"matmul, {self.rows} rows, {self.inputs} x {'2 x ' * self.gated}{self.columns}"

    @property
    def bytes(self) -> int:
        return 2 * (self._weights + self.rows * (self.inputs + self.columns))

    @property
    def operations(self) -> int:
        return 2 * self.rows * self._weights

    @property
    def _weights(self) -> int:
        return self.inputs * self.columns * (1 + self.gated)

    @property
    def name(self) -> str:
        sizes = f"{self.inputs}x{'2x' * self.gated}{self.columns}-in-{'last' if self.last else 'first'}"
        after = "".join(f"-{name}" for name in ("gated", "bias", "residual") if getattr(self, name))
        result = "" if self.result == "bfloat16" else f"-to-{_SHORT[self.result]}"
        return f"{sizes}-rows{self.rows}-{_SHORT[self.dtype]}{result}{after}"

    @property
    def targets(self) -> tuple[str, ...]:
        """An H100, and an H200 where its tiles differ."""
        return (HOPPER, *[H200] * self.differs)

    @property
    def kernel(self) -> Callable[..., Any]:
        return functools.partial(launch.matmul, **self.options, dtype=self.result)

    @property
    def options(self) -> dict[str, Any]:
        return {"layout": "in last" if self.last else "in first", "gated": bool(self.gated)}

    def arguments(self) -> tuple[Any, ...]:
        outputs = (2, self.columns) if self.gated else (self.columns,)
        weights = (*outputs, self.inputs) if self.last else (self.inputs, *outputs)
        scaled = self.dtype in ("int8", "float8_e4m3fn")
        extras = Extras(
            x_scales=shaped(self.rows, dtype="float32") if scaled else None,
            scales=shaped(*outputs, dtype="float32") if scaled else None,
            bias=shaped(*outputs, dtype=self.result) if self.bias else None,
            residual=shaped(self.rows, self.columns, dtype=self.result) if self.residual else None,
        )
        return shaped(self.rows, self.inputs, dtype=self.dtype), shaped(*weights, dtype=self.dtype), extras

    def tiles(self, device_kind: str) -> launch.Tiles:
        """Return the tiles that the heuristic chooses on this device."""
        return launch.heuristic_tiles(
            *self.arguments(), **self.options, dtype=self.result, rates=rates.rates_of(device_kind)
        )

    @property
    def differs(self) -> bool:
        return self.tiles(rates.H100) != self.tiles(rates.H200)

    def operands(self, draw: Draw) -> tuple[Any, ...]:
        x, weights, _ = self.arguments()
        return draw.normal(x), draw.normal(weights, self.inputs**-0.5)

    def problem(self, multiprocessors: int) -> Problem:
        x, weights, _ = self.arguments()
        return Problem(
            key=matmul_key(x, weights, **self.options),
            heuristic=launch.heuristic_tiles(x, weights, **self.options, multiprocessors=multiprocessors),
            grid={
                "consumers": [
                    one for one in CONSUMERS if GROUP * one < self.rows + GROUP <= _MOST_GROUPS * GROUP * one
                ],
                "columns": COLUMNS,
                "depth": (64, 128),
                "stages": (4, 6, 8, 12),
                "row_blocks": [one for one in TOGETHER if GROUP * one < self.rows + GROUP],
                "column_blocks": TOGETHER,
                "panel": (4, 8, 16) if self.rows > 512 else (8,),
                "blocks": (multiprocessors,),
            },
            refusal=lambda tiles: launch.refusal(x, weights, **self.options, tiles=tiles),
            launch=functools.partial(launch.matmul, **self.options),
            operands=functools.partial(
                operand_sets,
                self.operands,
                varied=1,
                count=sets_beyond_cache(weights.size * weights.dtype.itemsize),
            ),
        )


class OnH200(Product):
    """A product that is compiled for an H200 alone."""

    targets = (H200,)


def layer(rows: int, kind: type[Product] = Product) -> tuple[Product, ...]:
    """Return the products of Llama-3.1-8B in jaxinfer: QKV, output, gate with up, down, LM head."""
    return (
        kind(rows, 4096, 6144),
        kind(rows, 4096, 4096, residual=1),
        kind(rows, 4096, 14336, last=1, gated=1),
        kind(rows, 14336, 4096, residual=1),
        kind(rows, 4096, 128256, last=1),
    )


def _narrow(rows: int, dtype: str) -> tuple[Product, ...]:
    return (
        Product(rows, 4096, 6144, last=1, dtype=dtype),
        Product(rows, 4096, 14336, last=1, gated=1, dtype=dtype),
        Product(rows, 14336, 4096, last=1, dtype=dtype, residual=1),
    )


SHIPPED = (
    # Row counts of decode programs that an H100 is not checked at.
    *(one for rows in (2, 16, 32, 128, 512) for one in layer(rows, OnH200) if one.differs),
    *(product for rows in (1, 8, 64, 256, 2048, 8192) for product in layer(rows)),
    *(product for dtype in ("float8_e4m3fn", "int8") for rows in (8, 256, 8192) for product in _narrow(rows, dtype)),
    # Other epilogues, layouts and dtypes.
    Product(64, 3584, 4608, last=1, bias=1),
    Product(64, 896, 1152, bias=1),
    Product(2048, 896, 1152, last=1, bias=1, residual=1),
    Product(20, 896, 1184, residual=1),
    Product(333, 896, 1168, last=1, bias=1, residual=1),
    Product(3, 896, 1168, last=1, gated=1, residual=1),
    Product(512, 896, 4864, last=1, gated=1, bias=1),
    Product(64, 4096, 14336, gated=1),
    Product(2048, 4096, 14336, gated=1),
    Product(16, 4096, 6144, dtype="float16", result="float16"),
    Product(2048, 14336, 4096, dtype="float16", result="float16", residual=1),
    Product(64, 4096, 128256, last=1, result="float32"),
    Product(2048, 4096, 6144, last=1, dtype="float8_e4m3fn", result="float16", bias=1),
    Product(2048, 4096, 6144, last=1, dtype="int8", result="float32"),
)
TUNED = (
    Tunable(
        kernel=MATMUL,
        bits=frozenset(),
        shapes=tuple(dataclasses.replace(one, residual=0) for rows in (64, 2048, 8, 256) for one in layer(rows)),
        problem=Product.problem,
    ),
)


def trial_case(draw: Draw, x: Any, weights: Any, extras: Any, **options: Any) -> Case:
    small = 1.0 if weights.dtype == "int8" else x.shape[-1] ** -0.5
    given = extras._replace(
        x_scales=draw.uniform(extras.x_scales, 0.01, 0.02),
        scales=draw.uniform(extras.scales, 0.001, 0.002),
        bias=draw.normal(extras.bias),
        residual=draw.normal(extras.residual),
    )
    return Case((draw.normal(x), draw.normal(weights, small), given), options)
