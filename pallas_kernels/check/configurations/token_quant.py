"""Shipped shapes of token quantisation for `python -m pallas_kernels.check`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.configuration import ADA, AMPERE, HOPPER, Configuration, shaped
from pallas_kernels.token_quant import mosaic
from pallas_kernels.token_quant.reference import Rule

_RULES = {
    "int8": Rule("int8", 127.5),
    "fp8": Rule("float8_e4m3fn", 448.0),
    "fp8-bound": Rule("float8_e4m3fn", 448.0, 1200.0),
}


def _build(inputs: int, dtype: Any, rule: Rule) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return functools.partial(mosaic.quantize, rule=rule), (shaped(64, inputs, dtype=dtype),)


def _configuration(kind: str, inputs: int, dtype: Any = jnp.bfloat16) -> Configuration:
    targets = (HOPPER, ADA) if kind.startswith("fp8") else (HOPPER, AMPERE, ADA)
    name = f"{kind}-{inputs}-{jnp.dtype(dtype).name}"
    return Configuration("token_quant", name, functools.partial(_build, inputs, dtype, _RULES[kind]), targets)


CONFIGURATIONS = (
    *(_configuration(kind, inputs) for kind in ("int8", "fp8") for inputs in (4096, 8192, 14336, 16384)),
    *(_configuration(kind, inputs) for kind in ("int8", "fp8") for inputs in (128, 11008)),
    _configuration("fp8-bound", 4096),
    _configuration("int8", 11264, jnp.float16),
    _configuration("fp8", 4096, jnp.float16),
)
