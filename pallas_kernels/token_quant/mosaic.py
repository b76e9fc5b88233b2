"""Quantise tokens to 8 bits in one launch, in Pallas Mosaic GPU, for Ampere (int8), Ada and Hopper.

A CTA (128 threads) holds one whole token in its registers: it is read once, and its result depends neither on other
tokens nor on how many there are.

    device memory         registers of a warp     shared memory   registers        device memory
    x[token, a quarter] -> its largest magnitude -> [4 quarters] -> scale, codes -> codes[token], scales[token]
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Num

from pallas_kernels import compat
from pallas_kernels.layouts import THREADS, WARPS, row_layout
from pallas_kernels.token_quant.reference import Rule

MOST_INPUTS = 16_384  # 128 numbers per thread


class _Smem(NamedTuple):
    largest: Any  # [WARPS]: largest magnitude of each quarter


def quantize(
    x: Float[Array, "rows k"], rule: Rule, *, multiple: int = 1, interpret: plgpu.InterpretGPUParams | None = None
) -> tuple[Num[Array, "rows k"], Float[Array, " scales"]]:
    """See `reference.quantize`.

    Args:
        multiple: see `api.quantize`.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: the tokens are rejected, see `refusal`.
    """
    if (why := refusal(x, rule)) is not None:
        raise ValueError(why)
    rows, inputs = x.shape
    columns = inputs // WARPS
    launch = compat.kernel(
        functools.partial(_body, rule, columns),
        out_type=(
            jax.ShapeDtypeStruct((rows, WARPS, columns), jnp.dtype(rule.dtype)),
            jax.ShapeDtypeStruct((rows + -rows % multiple,), jnp.float32),
        ),
        scratch_types={"smem": _Smem(plgpu.SMEM((WARPS,), jnp.float32))},
        grid=(rows,),
        grid_names=("token",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="token_quant",
        # Mosaic inserts the barriers for SMEM.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        cost_estimate=pl.CostEstimate(flops=4 * x.size, transcendentals=0, bytes_accessed=3 * x.size),
        interpret=interpret,
    )
    codes, scales = launch(x.reshape(rows, WARPS, columns))
    return codes.reshape(rows, inputs), scales


def refusal(x: Any, rule: Rule) -> str | None:
    """Return why this kernel does not support such tokens; None if it does. The number of tokens does not matter."""
    if x.dtype not in (jnp.bfloat16, jnp.float16) or rule.dtype not in ("int8", "float8_e4m3fn"):
        return f"tokens of {x.dtype} rounded to {rule.dtype}: of bfloat16 or float16 to int8 or float8_e4m3fn"
    inputs = x.shape[-1]
    if x.size == 0 or inputs % THREADS or inputs > MOST_INPUTS:
        return f"tokens {x.shape} of {inputs} numbers: multiples of {THREADS} up to {MOST_INPUTS}"
    return None


def _body(rule: Rule, columns: int, x: Any, codes: Any, scales: Any, smem: _Smem) -> None:
    token = lax.axis_index("token")
    numbers = plgpu.load(x.at[token], layout=_layout(columns), optimized=False).astype(jnp.float32)
    smem.largest[...] = jnp.abs(numbers).max(axis=1)
    scale = rule.divided(functools.reduce(jnp.maximum, [smem.largest[warp] for warp in range(WARPS)])) / rule.most
    compat.store(codes.at[token], rule.codes(numbers / scale))
    scales[token] = scale


def _layout(columns: int) -> Any:
    """Return a layout with a quarter of a token per warp, in the widest vectors that leave every thread some."""
    found = (row_layout(WARPS, columns, widest) for widest in (8, 4, 2, 1))
    return next(layout for layout, whole in found if whole)
