"""Shapes of token quantisation: layers of Llama-3.1-8B and others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from pallas_kernels.operands import Case, Draw
from pallas_kernels.specs import ADA, EVERYWHERE, HOPPER, Spec, shaped
from pallas_kernels.token_quant import mosaic
from pallas_kernels.token_quant.reference import Rule

RULES = {
    "int8": Rule("int8", 127.5),
    "fp8": Rule("float8_e4m3fn", 448.0),
    "fp8-bound": Rule("float8_e4m3fn", 448.0, 1200.0),
}


@dataclasses.dataclass(frozen=True)
class Tokens(Spec):
    """64 tokens, quantized by one of `RULES`."""

    rule: str
    inputs: int
    dtype: str = "bfloat16"

    op = "token_quant"

    @property
    def name(self) -> str:
        return f"{self.rule}-{self.inputs}-{self.dtype}"

    @property
    def targets(self) -> tuple[str, ...]:
        return (HOPPER, ADA) if self.rule.startswith("fp8") else EVERYWHERE

    @property
    def kernel(self) -> Callable[..., Any]:
        return functools.partial(mosaic.quantize, rule=RULES[self.rule])

    def arguments(self) -> tuple[Any, ...]:
        return (shaped(64, self.inputs, dtype=self.dtype),)


SHIPPED = (
    *(Tokens(rule, inputs) for rule in ("int8", "fp8") for inputs in (4096, 8192, 14336, 16384)),
    *(Tokens(rule, inputs) for rule in ("int8", "fp8") for inputs in (128, 11008)),
    Tokens("fp8-bound", 4096),
    Tokens("int8", 11264, "float16"),
    Tokens("fp8", 4096, "float16"),
)


def trial_case(draw: Draw, x: Any, **options: Any) -> Case:
    return Case((draw.normal(x),), options)
