"""API of lora: Mosaic kernels for Ampere, Ada and Hopper GPUs, XLA everywhere else.

Rows are grouped into tiles once for all weights of a step (`group`), before it is known which weights the kernels
support. XLA takes tiles of either kind.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import grouped_matmul as grouped
from pallas_kernels.choice import AMPERE, HOPPER, Choice, Target, Wish, choose, lowering_target
from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.launches import note
from pallas_kernels.lora import cpu, mosaic, xla
from pallas_kernels.lora.reference import check

_OP = "lora"


def group(
    slots: Int[Array, " rows"],
    count: int,
    most: int,
    *,
    spread: int | None = None,
    path: Wish = "auto",
    target: Target | None = None,
) -> Groups:
    """Group rows into tiles of one adapter each; see `pallas_kernels.grouped_matmul.group`.

    Args:
        slots: the adapter of each row, 0 to ``count`` - 1; a row with any other has none, and is in no tile.
        count: number of adapters.
        most: the most rows of one adapter.
        spread: likely number of distinct adapters of the rows; None: ``count``.
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.
    """
    chosen = _choose(None, path, target).path
    return grouped.group(slots, count, most, spread=spread, path=chosen, kernel_rows=mosaic.TILE_ROWS, target=target)


def by_slot(groups: Groups, count: int, *, target: Target | None = None) -> cpu.BySlot | None:
    """Arrange few rows by slot in addition to tiles, the faster form of `low_rank` on a CPU.

    Args:
        groups: result of `group`.
        count: number of adapters.
        target: lowering target of the program; None: see `pallas_kernels.choice`.
    """
    return cpu.by_slot(groups, count) if (target or lowering_target()).platform == "cpu" else None


def explain(
    x: Any, a: Any, b: Any, groups: Groups | None = None, *, path: Wish = "auto", target: Target | None = None
) -> Choice:
    """Return the path that `low_rank` takes for operands of these shapes and dtypes, and why.

    Args:
        x: [..., k]; the number of rows does not matter here.
        groups: None: tiles as the path wants them, see `group`.
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: the Mosaic kernels are forced and do not support these operands; or they do not fit each other.
    """
    check(x, a, b)
    return _choose(mosaic.refusal(x, a, _flat(b), groups), path, target)


def low_rank(
    x: Float[Array, "rows k"],
    a: Float[Array, "slots rank k"],
    b: Float[Array, "slots *n rank"],
    groups: Groups,
    slots: cpu.BySlot | None = None,
    *,
    path: Wish = "auto",
    target: Target | None = None,
) -> Float[Array, "rows *n"]:
    """Multiply each row by the transposed ``a``, and then ``b``, of its adapter, in the dtype of ``x``; rows without an
    adapter give zeros.

    A row's result depends on no other row, nor on other adapters in the banks. float32 means float32: no TF32. The op
    supports reverse-mode differentiation, and batching by `jax.vmap`: both take the XLA path all the way.

    Args:
        groups: result of `group`.
        slots: result of `by_slot`.
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: shapes that do not fit each other, or a forced path that does not support them.
    """
    if explain(x, a, b, groups, path=path, target=target).path == "xla":
        return xla.low_rank(x, a, b, groups, slots, target=target)
    flat = b.reshape(_flat(b).shape)
    note(_OP, mosaic.low_rank, xla.low_rank, x, a, flat, groups)
    return _by_kernels(x, a, flat, groups).reshape(-1, *b.shape[1:-1])


def _choose(refusal: str | None, path: Wish, target: Target | None) -> Choice:
    if _spread():
        refusal = "The weights are spread over devices: the Mosaic kernels know of one."
    return choose(_OP, path, refusal, least=AMPERE, most=HOPPER, target=target)


def _spread() -> bool:
    """Return whether XLA shards the traced program over devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(size > 1 for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)


def _flat(b: Any) -> jax.ShapeDtypeStruct:
    """Flatten the outputs of ``b`` to one dimension."""
    slots, *outputs, rank = b.shape
    return jax.ShapeDtypeStruct((slots, math.prod(outputs), rank), b.dtype)


_GPU = Target("gpu", HOPPER)


@jax.custom_batching.custom_vmap
def _kernels(x: jax.Array, a: jax.Array, b: jax.Array, groups: Groups) -> jax.Array:
    return mosaic.low_rank(x, a, b, groups)


@_kernels.def_vmap
def _batched(_: int, batched: Any, *operands: Any) -> tuple[jax.Array, bool]:
    axes = jax.tree.map(lambda one: 0 if one else None, tuple(batched))
    return jax.vmap(functools.partial(xla.low_rank, target=_GPU), in_axes=axes)(*operands), True


@jax.custom_vjp
def _by_kernels(x: jax.Array, a: jax.Array, b: jax.Array, groups: Groups) -> jax.Array:
    result: jax.Array = _kernels(x, a, b, groups)
    return result


def _forward(x: jax.Array, a: jax.Array, b: jax.Array, groups: Groups) -> tuple[jax.Array, Any]:
    return jax.vjp(lambda x, a, b: xla.low_rank(x, a, b, groups, target=_GPU), x, a, b)


def _backward(pullback: Any, change: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    of_x, of_a, of_b = pullback(change)
    return of_x, of_a, of_b, None


_by_kernels.defvjp(_forward, _backward)
