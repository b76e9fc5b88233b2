"""The door of quant_matmul: a Mosaic kernel for few rows on Hopper GPUs, plain XLA everywhere else."""

from __future__ import annotations

import math
from typing import Any

import jax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.choice import HOPPER, Choice, Target, Wish, choose
from pallas_kernels.quant_matmul import mosaic, xla
from pallas_kernels.quant_matmul.reference import group_size


def explain(
    x: Any, weights: Any, scales: Any, zeros: Any = None, *, path: Wish = "auto", target: Target | None = None
) -> Choice:
    """The path that `matmul` takes for operands of these shapes and dtypes, and why.

    Args:
        path: "mosaic" and "xla" force one.
        target: what the program is lowered for; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: the Mosaic kernel is forced and cannot do these operands; or they do not fit each other.
    """
    if x.shape[-1] != weights.shape[1]:
        raise ValueError(f"x {x.shape} and weights {weights.shape} of [outputs, inputs] do not fit each other")
    flat = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    refusal = mosaic.refusal(flat, weights, scales, zeros)
    chosen = choose(path, refusal, least=HOPPER, most=HOPPER, target=target)
    fused = zeros is None and group_size(weights, scales) == weights.shape[1]
    if path == "auto" and chosen.path == "mosaic" and fused:
        return Choice("xla", "A channel has one scale: XLA fuses the weights' conversion into its own matrix product.")
    return chosen


def matmul(
    x: Float[Array, "*rows k"],
    weights: Num[Array, "n k"],
    scales: Float[Array, "*groups n"],
    zeros: Int[Array, "groups n"] | None = None,
    *,
    path: Wish = "auto",
) -> Float[Array, "*rows n"]:
    """``x @ ((weights - zeros) * scales).T`` in the dtype of ``x``; `reference` says how weights are stored.

    Raises:
        ValueError: operands that do not fit each other, or a forced path that cannot do them.
    """
    flat = x.reshape(-1, x.shape[-1])
    chosen = explain(flat, weights, scales, zeros, path=path)
    result = (mosaic if chosen.path == "mosaic" else xla).matmul(flat, weights, scales, zeros)
    return result.reshape(*x.shape[:-1], weights.shape[0])
