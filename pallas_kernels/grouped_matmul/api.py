"""API of grouped_matmul: a Mosaic kernel for 16-bit numbers on Hopper GPUs, XLA everywhere else."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.choice import HOPPER, Choice, Target, Wish, choose
from pallas_kernels.grouped_matmul import mosaic, xla
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.reference import check
from pallas_kernels.launches import note

_OP = "grouped_matmul"


def explain(
    x: Any, weights: Any, groups: Groups | None = None, *, path: Wish = "auto", target: Target | None = None
) -> Choice:
    """Return the path that `matmul` takes for operands of these shapes and dtypes, and why.

    Args:
        x: [tiles, rows, k], or [..., k] before rows are in tiles; the number of rows does not matter here.
        groups: None: tiles as the path wants them, see `group`.
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: the Mosaic kernel is forced and does not support these operands; or they do not fit each other.
    """
    check(x, weights)
    if groups is None:
        x = jax.ShapeDtypeStruct((1, mosaic.TILE_ROWS, x.shape[-1]), x.dtype)
    return choose(_OP, path, mosaic.refusal(x, _flat(weights), groups), least=HOPPER, most=HOPPER, target=target)


def matmul(
    x: Float[Array, "tiles rows k"],
    weights: Float[Array, "experts *n k"],
    groups: Groups,
    *,
    path: Wish = "auto",
    target: Target | None = None,
) -> Float[Array, "tiles rows *n"]:
    """Multiply each tile's rows by the transposed weights of the tile's expert, in the dtype of ``x``.

    Empty tiles give zeros, or the product of their zero rows. float32 means float32: no TF32. The op supports
    reverse-mode differentiation, and batching by `jax.vmap`: both take the XLA path all the way.

    Args:
        x: zeros in the rows that hold no entry.
        weights: outputs by inputs, of every expert.
        groups: result of `group`.
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: shapes that do not fit each other, or a forced path that does not support them.
    """
    chosen = explain(x, weights, groups, path=path, target=target)
    flat = weights.reshape(_flat(weights).shape)
    if chosen.path == "mosaic":
        note(_OP, mosaic.matmul, xla.matmul, x, flat, groups)
        result = _by_kernel(x, flat, groups)
    else:
        result = xla.matmul(x, flat, groups, target=target)
    return result.reshape(*x.shape[:2], *weights.shape[1:-1])


def _flat(weights: Any) -> jax.ShapeDtypeStruct:
    """Flatten the outputs of weights to one dimension."""
    experts, *outputs, inputs = weights.shape
    return jax.ShapeDtypeStruct((experts, math.prod(outputs), inputs), weights.dtype)


_GPU = Target("gpu", HOPPER)


@jax.custom_batching.custom_vmap
def _kernel(x: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
    return mosaic.matmul(x, weights, groups)


@_kernel.def_vmap
def _batched(_: int, batched: Any, *operands: Any) -> tuple[jax.Array, bool]:
    """Run a batch of calls on the XLA path: a Mosaic kernel supports no further dimension."""
    axes = jax.tree.map(lambda one: 0 if one else None, tuple(batched))
    return jax.vmap(functools.partial(xla.matmul, target=_GPU), in_axes=axes)(*operands), True


@jax.custom_vjp
def _by_kernel(x: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
    result: jax.Array = _kernel(x, weights, groups)
    return result


def _forward(x: jax.Array, weights: jax.Array, groups: Groups) -> tuple[jax.Array, Any]:
    return jax.vjp(lambda x, weights: xla.matmul(x, weights, groups, target=_GPU), x, weights)


def _backward(pullback: Any, change: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    of_x, of_weights = pullback(change)
    return of_x, of_weights, None


_by_kernel.defvjp(_forward, _backward)
