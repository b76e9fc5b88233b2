"""API of quant_matmul: a Mosaic kernel on Hopper GPUs, XLA everywhere else."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.choice import HOPPER, Choice, Target, Wish, choose
from pallas_kernels.grouped_matmul.groups import KERNEL_ROWS, Groups
from pallas_kernels.launches import note, noted
from pallas_kernels.quant_matmul import xla
from pallas_kernels.quant_matmul.fit import Operands, of_rows, refusal
from pallas_kernels.quant_matmul.mosaic import launch
from pallas_kernels.quant_matmul.reference import group_size

_OP = "quant_matmul"


def explain(
    x: Any,
    weights: Any,
    scales: Any,
    zeros: Any = None,
    *,
    e2m1: bool = False,
    path: Wish = "auto",
    target: Target | None = None,
) -> Choice:
    """Return the path that `matmul` takes for operands of these shapes and dtypes, and why.

    Args:
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: the Mosaic kernel is forced and does not support these operands; or they do not fit each other.
    """
    if x.shape[-1] != weights.shape[1]:
        raise ValueError(f"x {x.shape} and weights {weights.shape} of [outputs, inputs] do not fit each other")
    flat = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    whole = group_size(weights, scales, zeros) == weights.shape[1]
    why = refusal(of_rows(flat, weights, scales, zeros, e2m1=e2m1))
    chosen = choose(_OP, path, why, least=HOPPER, most=HOPPER, target=target)
    if path == "auto" and chosen.path == "mosaic" and whole and zeros is None:
        return Choice("xla", "A channel has one scale: XLA fuses the weights' conversion into its own matrix product.")
    return chosen


def matmul(
    x: Float[Array, "*rows k"],
    weights: Num[Array, "n k"],
    scales: Num[Array, "*groups n"],
    zeros: Int[Array, "groups n"] | None = None,
    *,
    e2m1: bool = False,
    path: Wish = "auto",
) -> Float[Array, "*rows n"]:
    """Compute ``x @ ((weights - zeros) * scales).T`` in the dtype of ``x``; `reference` defines the storage.

    Args:
        e2m1: weights and scales are those of MXFP4.

    Raises:
        ValueError: operands that do not fit each other, or a forced path that does not support them.
    """
    flat = x.reshape(-1, x.shape[-1])
    chosen = explain(flat, weights, scales, zeros, e2m1=e2m1, path=path)
    run = noted(_OP, chosen.path, launch.matmul, xla.matmul)
    result: jax.Array = run(flat, weights, scales, zeros, e2m1=e2m1)
    return result.reshape(*x.shape[:-1], weights.shape[0])


def explain_tiles(
    x: Any,
    weights: Any,
    scales: Any,
    zeros: Any = None,
    *,
    e2m1: bool = False,
    path: Wish = "auto",
    target: Target | None = None,
) -> Choice:
    """Return the path that `matmul_tiles` takes for operands of these shapes and dtypes, and why.

    Args:
        x: [tiles, rows, k], or [..., k] before rows are in tiles; the number of rows does not matter here.

    Raises:
        ValueError: the Mosaic kernel is forced and does not support these operands.
    """
    tiles = jax.ShapeDtypeStruct((1, KERNEL_ROWS[0], x.shape[-1]), x.dtype)
    why = refusal(Operands(tiles, weights, scales, zeros, e2m1, grouped=True))
    return choose(_OP, path, why, least=HOPPER, most=HOPPER, target=target)


def matmul_tiles(
    x: Float[Array, "tiles rows k"],
    weights: Num[Array, "experts n k"],
    scales: Num[Array, "groups experts n"],
    zeros: Int[Array, "groups experts n"] | None,
    groups: Groups,
    *,
    e2m1: bool = False,
    path: Wish = "auto",
    target: Target | None = None,
) -> Float[Array, "tiles rows n"]:
    """Multiply each tile's rows by the transposed stored weights of the tile's expert, like `grouped_matmul.matmul`.

    Empty tiles give zeros, or the product of their zero rows. A batch of calls (`jax.vmap`) takes the XLA path.

    Raises:
        ValueError: a forced path that does not support the operands.
    """
    chosen = explain_tiles(x, weights, scales, zeros, e2m1=e2m1, path=path, target=target)
    if chosen.path == "mosaic" and groups.experts is not None:
        note(_OP, launch.matmul_tiles, xla.matmul_tiles, x, weights, scales, zeros, groups, e2m1=e2m1)
        result: jax.Array = _kernel(e2m1)(x, weights, scales, zeros, groups)
        return result
    return xla.matmul_tiles(x, weights, scales, zeros, groups, e2m1=e2m1, target=target)


@functools.cache
def _kernel(e2m1: bool) -> Any:
    @jax.custom_batching.custom_vmap
    def multiply(*operands: Any) -> jax.Array:
        return launch.matmul_tiles(*operands, e2m1=e2m1)

    @multiply.def_vmap
    def _(_: int, batched: Any, *operands: Any) -> tuple[jax.Array, bool]:
        axes = jax.tree.map(lambda one: 0 if one else None, tuple(batched))
        plain = functools.partial(xla.matmul_tiles, e2m1=e2m1, target=Target("gpu", HOPPER))
        return jax.vmap(plain, in_axes=axes)(*operands), True

    return multiply
