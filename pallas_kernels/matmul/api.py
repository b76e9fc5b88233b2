"""API of matmul: a Mosaic kernel on Hopper GPUs where measurements found it faster, XLA elsewhere."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Num

from pallas_kernels.choice import HOPPER, Choice, Target, Wish, choose, lowering_target
from pallas_kernels.launches import note
from pallas_kernels.matmul import xla
from pallas_kernels.matmul.mosaic import launch
from pallas_kernels.matmul.tile_keys import MATMUL, matmul_key
from pallas_kernels.matmul.types import NOTHING, Extras, Layout
from pallas_kernels.tiles import tuned

_OP = "matmul"


def explain(
    x: Any,
    weights: Any,
    extras: Extras = NOTHING,
    *,
    layout: Layout = "in first",
    gated: bool = False,
    dtype: Any = None,
    path: Wish = "auto",
    measured: bool = True,
    target: Target | None = None,
) -> Choice:
    """Return the path that `matmul` takes for operands of these shapes and dtypes, and why.

    The choice ignores the number of rows: "auto" is the same path for every number of rows, or results would depend on
    it. It is the kernel if the device's tuned tiles (`pallas_kernels.tiles`) have an entry for the weights' shape:
    tuning adds no entry where XLA is faster.

    Args:
        path: "mosaic" and "xla" force one.
        measured: False: "auto" takes the kernel wherever it is supported, tuned or not.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: the Mosaic kernel is forced and does not support these operands; or they do not fit each other.
    """
    flat, flat_extras = _shapes(x, extras)
    refusal = launch.refusal(flat, weights, flat_extras, layout=layout, gated=gated, dtype=dtype)
    target = target or lowering_target()
    chosen = choose(_OP, path, refusal, least=HOPPER, most=HOPPER, target=target)
    if path != "auto" or chosen.path == "xla" or not measured:
        return chosen
    if tuned(MATMUL, target.device_kind, matmul_key(flat, weights, layout=layout, gated=gated)) is None:
        return Choice("xla", f"No tuned tiles of {target.device_kind} are for weights {weights.shape} {layout}.")
    return chosen


def matmul(
    x: Num[Array, "*rows k"],
    weights: Num[Array, "..."],
    extras: Extras = NOTHING,
    *,
    layout: Layout = "in first",
    gated: bool = False,
    dtype: Any = None,
    path: Wish = "auto",
    target: Target | None = None,
) -> Float[Array, "*rows *n"]:
    """Compute ``x @ weights`` and the epilogue of a layer; `reference` defines the roundings.

    With the kernel a row is bitwise independent of other rows, their number and its index. float32 means float32: no
    TF32. The op supports reverse-mode differentiation, and batching by `jax.vmap`: both take the XLA path all the way.

    Args:
        weights: [k, *n], or [*n, k] ("in last"); of a gated product, [k, 2, n] or [2, n, k]: gate, then up.
        extras: scales, bias and residual, with the rows of ``x``.
        gated: the result is silu(gate) * up.
        dtype: dtype of the result; None: the dtype of ``x``, bfloat16 if that has 8 bits.
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: shapes that do not fit each other, or a forced path that does not support them.
    """
    chosen = explain(x, weights, extras, layout=layout, gated=gated, dtype=dtype, path=path, target=target)
    call, rows = _Call(layout, gated, dtype), x.shape[:-1]
    flat = x.reshape(-1, x.shape[-1])
    if chosen.path == "mosaic":
        note(_OP, launch.matmul, xla.matmul, flat, weights, _flat(extras, rows), **call._asdict())
    result = (_by_kernel if chosen.path == "mosaic" else _by_xla)(call, flat, weights, _flat(extras, rows))
    return result.reshape(*rows, *result.shape[1:])


def _shapes(x: Any, extras: Extras) -> tuple[Any, Extras]:
    """Return the shapes of operands with rows flattened to one dimension."""
    rows = x.shape[:-1]
    flat = jax.ShapeDtypeStruct((math.prod(rows), x.shape[-1]), x.dtype)
    return flat, jax.eval_shape(lambda given: _flat(given, rows), extras)


def _flat(extras: Extras, rows: tuple[int, ...]) -> Extras:
    """Flatten the rows of the extras that have rows to one dimension."""
    flat = {
        name: array.reshape(-1, *array.shape[len(rows) :])
        for name, array in (("x_scales", extras.x_scales), ("residual", extras.residual))
        if array is not None
    }
    return extras._replace(**flat)


class _Call(NamedTuple):
    """The static arguments of a call."""

    layout: Layout
    gated: bool
    dtype: Any


def _by_xla(call: _Call, x: Any, weights: Any, extras: Extras) -> jax.Array:
    return xla.matmul(x, weights, extras, **call._asdict())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(call: _Call, x: jax.Array, weights: jax.Array, extras: Extras) -> jax.Array:
    @jax.custom_batching.custom_vmap
    def kernel(x: jax.Array, weights: jax.Array, extras: Extras) -> jax.Array:
        return launch.matmul(x, weights, extras, **call._asdict())

    @kernel.def_vmap
    def batched(_: int, of: Any, *operands: Any) -> tuple[jax.Array, bool]:
        """Run a batch of calls on the XLA path: a Mosaic kernel supports no further dimension."""
        axes = jax.tree.map(lambda one: 0 if one else None, tuple(of))
        return jax.vmap(functools.partial(_by_xla, call), in_axes=axes)(*operands), True

    result: jax.Array = kernel(x, weights, extras)
    return result


def _forward(call: _Call, x: jax.Array, weights: jax.Array, extras: Extras) -> tuple[jax.Array, Any]:
    return jax.vjp(functools.partial(_by_xla, call), x, weights, extras)


def _backward(call: _Call, pullback: Any, change: jax.Array) -> tuple[Any, ...]:
    changes: tuple[Any, ...] = pullback(change)
    return changes


_by_kernel.defvjp(_forward, _backward)
