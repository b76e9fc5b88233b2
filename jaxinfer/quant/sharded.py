"""Low-rank products over a mesh: each device holds the shards of an adapter that match its shard of the weight."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.parallel.mesh import RULES, devices_along, spread_over
from pallas_kernels import grouped_matmul as grouped
from pallas_kernels import lora
from pallas_kernels.grouped_matmul import Groups

Axes = Sequence[str | None]
Dealt = tuple[Groups, lora.BySlot | None]
"""Rows grouped into tiles, and by slot, see `pallas_kernels.lora`."""


def is_spread() -> bool:
    """Return whether the traced program runs on several devices and is not inside a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size > 1 and AxisType.Manual not in mesh.axis_types


def spread_low_rank(
    x: Float[Array, "rows k"],
    a: Float[Array, "slots rank k"],
    b: Float[Array, "slots *out rank"],
    dealt: Dealt,
    axes: Axes,
) -> Float[Array, "rows *out"]:
    """Shrink and expand each row by its adapter, on the mesh of the traced program.

    If the inputs are sharded, each device shrinks its shard: the partial sums, of size rank per row, are reduced before
    they are expanded, so the expanded values are the same on every device.

    Args:
        axes: logical axes of the weight's outputs and, last, of its inputs.
    """
    if not is_spread():
        return lora.low_rank(x, a, b, *dealt)
    *outs, along = spread_over(axes, (*b.shape[1:-1], x.shape[-1]))
    summed = devices_along(jax.sharding.get_abstract_mesh().shape, axes[-1]) > 1

    def own(x: jax.Array, a: jax.Array, b: jax.Array, dealt: Dealt) -> jax.Array:
        return _summed(x, a, b, dealt[0], along) if summed else lora.low_rank(x, a, b, *dealt)

    parts = PartitionSpec(None, along), PartitionSpec(None, None, along), PartitionSpec(None, *outs)
    run = jax.shard_map(own, in_specs=(*parts, PartitionSpec()), out_specs=PartitionSpec(None, *outs), check_vma=False)
    result: jax.Array = run(x, a, b, dealt)
    return result


def _summed(x: jax.Array, a: jax.Array, b: jax.Array, groups: Groups, along: tuple[str, ...] | None) -> jax.Array:
    """Multiply by rows, not by tiles: the tiling must not move a row within the reduced array."""
    return _by_rows(lax.psum(_by_rows(x, a, groups), along), b, groups)


def spread_lookup(
    ids: Int[Array, " rows"],
    a: Float[Array, "slots rank table"],
    b: Float[Array, "slots out rank"],
    slots: Int[Array, " rows"],
    groups: Groups,
    axes: Axes,
) -> Float[Array, "rows out"]:
    """Look up each row's column of its adapter's ``a`` and expand it, on the mesh of the traced program. If the table's
    rows are sharded, one device has the column and the others add zeros.

    Args:
        axes: logical axes of the table's outputs and, last, of its rows.
    """
    along = spread_over(axes[-1:], a.shape[-1:])[0] if is_spread() else None

    def own(ids: jax.Array, a: jax.Array, b: jax.Array, slots: jax.Array, groups: Groups) -> jax.Array:
        if along is None:
            return _by_rows(_columns(ids, a, slots), b, groups)
        local = ids - lax.axis_index(along) * a.shape[-1]
        is_here = (local >= 0) & (local < a.shape[-1])
        return _by_rows(lax.psum(jnp.where(is_here[:, None], _columns(local, a, slots), 0), along), b, groups)

    if along is None:
        return own(ids, a, b, slots, groups)
    parts = PartitionSpec(), PartitionSpec(None, None, along), *(PartitionSpec(),) * 3
    run = jax.shard_map(own, in_specs=parts, out_specs=PartitionSpec(), check_vma=False)
    result: jax.Array = run(ids, a, b, slots, groups)
    return result


def _columns(ids: jax.Array, a: jax.Array, slots: jax.Array) -> jax.Array:
    """Return values of size rank for each row; arbitrary ones for rows without an adapter."""
    return a.at[slots, :, ids].get(mode="clip")


def _by_rows(x: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
    """Multiply each row by its adapter's matrix; zeros for rows without an adapter."""
    result = grouped.matmul(grouped.taken(x, groups.entries), weights, groups)
    return grouped.taken(result.reshape(-1, *weights.shape[1:-1]), groups.places)


def once(bias: Float[Array, "*out"] | None, axes: Axes) -> Float[Array, "*out"] | None:
    """Return the bias for one device of a sum over sharded inputs: only the first device adds it."""
    mesh = jax.sharding.get_abstract_mesh()
    if bias is None or not axes or AxisType.Manual not in mesh.axis_types or devices_along(mesh.shape, axes[-1]) == 1:
        return bias
    return jnp.where(lax.axis_index(RULES[axes[-1] or ""]) == 0, bias, 0)


def partition_of(axes: Axes, shape: Sequence[int], *, bank: bool) -> dict[str, PartitionSpec]:
    """Return the `PartitionSpec` of each adapter array on the mesh of the traced program, by name.

    Args:
        shape: shape of the weight, ``[*out, in]``.
        bank: the arrays have a leading slot dimension.
    """
    *outs, along = spread_over(axes, shape)
    slots, experts = (None,) if bank else (), outs[: axes[0] == "expert"]
    of_outs = PartitionSpec(*slots, *outs)
    return {"a": PartitionSpec(*slots, *experts, None, along), "b": of_outs, "magnitude": of_outs, "bias": of_outs}
