"""Reference of the dense product with its epilogue, and its roundings: as if each step were a separate program.

    product = round(x . weights [* x_scales * scales])      float16, bfloat16 and 8 bits: one sum, one rounding
    product = round(product + round(bias))
    product = round(round(silu(gate)) * up)                 gated: the outputs are [2, n], gate before up
    result  = round(product + residual)

Rounding is to the dtype of the result; a missing step rounds nothing. XLA's own programs may keep more digits between
steps that they fuse (`xla_allow_excess_precision`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from pallas_kernels.matmul.types import NOTHING, Extras, Layout, inputs_of, outputs_of

__all__ = ["check", "finished", "matmul"]


def check(x: Any, weights: Any, extras: Extras, layout: Layout, *, gated: bool) -> None:
    """Raise ValueError if operands do not fit each other."""
    outputs = outputs_of(weights, layout)
    if x.ndim != 2 or not outputs or x.shape[1] != inputs_of(weights, layout):
        raise ValueError(f"x {x.shape} of [rows, inputs] and weights {weights.shape}, {layout}, do not fit each other")
    if gated and (len(outputs) != 2 or outputs[0] != 2):
        raise ValueError(f"outputs {outputs} of a gated product are not [2, n]")
    result = (x.shape[0], *(outputs[1:] if gated else outputs))
    wanted = Extras(x_scales=(x.shape[0],), scales=outputs, bias=outputs, residual=result)
    for name, array, shape in zip(Extras._fields, extras, wanted, strict=True):
        if array is None or (name == "x_scales" and array.ndim == 1 and array.shape >= shape):
            continue
        if array.shape != shape:
            raise ValueError(f"{name} {array.shape} of a product of x {x.shape} and weights {weights.shape}: {shape}")


def finished(
    product: Num[Array, "rows *n"],
    extras: Extras,
    *,
    gated: bool,
    wide: Any,
    rounded: Callable[[jax.Array], jax.Array],
) -> Num[Array, "rows *m"]:
    """Apply the epilogue to sums.

    Args:
        wide: dtype that a step is computed in.
        rounded: rounds the result of a step.
    """
    product = product.astype(wide)
    if extras.x_scales is not None:
        of_rows = extras.x_scales[: product.shape[0]].astype(wide)
        product = product * of_rows.reshape(-1, *(1,) * (product.ndim - 1))
    if extras.scales is not None:
        product = product * extras.scales.astype(wide)
    product = rounded(product)
    if extras.bias is not None:
        bias = rounded(extras.bias.astype(wide)).astype(wide)
        product = rounded(product.astype(wide) + bias)
    if gated:
        gate, up = product[:, 0].astype(wide), product[:, 1].astype(wide)
        product = rounded(rounded(jax.nn.silu(gate)).astype(wide) * up)
    if extras.residual is not None:
        product = rounded(product.astype(wide) + extras.residual.astype(wide))
    return product


def matmul(
    x: Num[Array, "rows k"],
    weights: Num[Array, "..."],
    extras: Extras = NOTHING,
    *,
    layout: Layout = "in first",
    gated: bool = False,
    dtype: Any = None,
    wide: Any = jnp.float32,
) -> Float[Array, "rows *n"]:
    """See the module.

    Args:
        dtype: dtype that steps are rounded to; None: no rounding.
        wide: dtype of all arithmetic and of the result.

    Raises:
        ValueError: operands that do not fit each other.
    """
    check(x, weights, extras, layout, gated=gated)
    flat = weights.reshape(weights.shape[0], -1).T if layout == "in first" else weights.reshape(-1, weights.shape[-1])
    product = jnp.einsum("mk,nk->mn", x.astype(wide), flat.astype(wide), precision="highest")
    product = product.reshape(-1, *outputs_of(weights, layout))

    def rounded(step: jax.Array) -> jax.Array:
        return step if dtype is None else step.astype(dtype).astype(wide)

    return finished(product, extras, gated=gated, wide=wide, rounded=rounded)
