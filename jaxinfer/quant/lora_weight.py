"""Weights with low-rank adapters (Hu et al. 2021): `LoRAWeight` wraps a weight and replaces it in the parameter tree.

It has one adapter for all rows, or a bank of adapters with a slot per row (`Rows`). As with tokens of one expert, rows
are grouped into tiles that share an adapter (Chen et al. 2023, Punica; `pallas_kernels.lora`): the result of a row
depends neither on other rows nor on other adapters in the bank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import ItemsView, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.quant.sharded import once, partition_of, spread_lookup, spread_low_rank
from pallas_kernels import grouped_matmul as grouped
from pallas_kernels import lora
from pallas_kernels.grouped_matmul import Groups

_RUN = 16  # rows of a tile where neighbours share an adapter: the same in all prefill programs


class Rows(NamedTuple):
    """The adapter of each row of a step.

    Attributes:
        slots: slot of each row's adapter in the banks; -1: no adapter.
        groups: rows grouped into tiles that each have one adapter.
        by_slot: rows grouped by slot; None: not on this device, or too many slots.
    """

    slots: Int[Array, " rows"]
    groups: Groups
    by_slot: lora.BySlot | None = None


def rows_of(slots: Int[Array, " rows"], count: int, *, runs: bool = False) -> Rows:
    """Assign rows to tiles, once for all weights of a step.

    Args:
        count: number of slots.
        runs: neighbouring rows mostly share an adapter, as in prompt chunks.
    """
    spread = max(1, 2 * slots.shape[0] // _RUN) if runs else None
    groups = lora.group(slots, count, most=slots.shape[0], spread=spread)
    return Rows(slots, groups, None if runs else lora.by_slot(groups, count))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["base", "a", "b", "magnitude", "bias", "rows"],
    meta_fields=["table", "axes"],
)
@dataclasses.dataclass(frozen=True)
class LoRAWeight:
    """A weight and its adapters: a product with it is ``magnitude * (base + x a^T b^T) + bias``.

    Attributes:
        base: an array in the orientation of its layer, or any storage.
        a: [rank, in]; for experts [experts, rank, in]; for a table [rank, rows of the table]. A bank has [slots, ...].
        b: [*out, rank]; for experts [experts, *out, rank].
        magnitude, bias: [*out]; for experts [experts, *out]. None: 1, and no bias.
        rows: slots of the rows; None: one adapter for all rows, or, if ``a`` is None too, no adapter: products then end
            in the same barrier as with adapters and are bitwise identical for rows without one.
        table: the adapters apply to looked-up rows (`take`) and not to products; otherwise to products only. A tied
            table can have both kinds, one as the ``base`` of the other.
        axes: logical axes of the weight's outputs and, last, of its inputs; (): no adapter.
    """

    base: Any
    a: Any = None
    b: Any = None
    magnitude: Any = None
    bias: Any = None
    rows: Rows | None = None
    table: bool = False
    axes: tuple[str | None, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    @property
    def size(self) -> int:
        return int(self.base.size)

    def items(self) -> ItemsView[str, Any]:
        """Arrays and storages by name."""
        named = {name: getattr(self, name) for name in ("base", "a", "b", "magnitude", "bias")}
        return {name: value for name, value in named.items() if value is not None}.items()

    def rebuilt(self, arrays: Mapping[str, Any]) -> LoRAWeight:
        """Return a copy with other leaves."""
        return dataclasses.replace(self, **arrays)

    def partition(self, base: Any) -> LoRAWeight:
        """Replace each array by its `PartitionSpec` on the mesh of the traced program; ``base``: the specs of the
        weight."""
        if self.a is None:
            return dataclasses.replace(self, base=base)
        bank = self.rows is not None
        found = partition_of(self.axes, (*self.b.shape[bank:-1], self.a.shape[-1]), bank=bank)
        rows = jax.tree.map(lambda _: PartitionSpec(), self.rows)
        own = {name: spec for name, spec in found.items() if getattr(self, name) is not None}
        return dataclasses.replace(self, base=base, rows=rows).rebuilt(own)

    def added(self, x: Float[Array, "*batch k"], base: Float[Array, "*batch *out"]) -> Float[Array, "*batch *out"]:
        """Apply the adapters to ``base``, the product of ``x`` with the weight itself."""
        if self.a is None:
            return lax.optimization_barrier(base)
        if self.rows is None:
            return _combined(base, _dot(_dot(x, self.a), self.b), self.magnitude, once(self.bias, self.axes))
        out = base.shape[x.ndim - 1 :]
        flat, own = x.reshape(-1, x.shape[-1]), lax.optimization_barrier(base).reshape(-1, *out)
        delta = spread_low_rank(flat, self.a, self.b, (self.rows.groups, self.rows.by_slot), self.axes)
        return self._chosen(own, delta).reshape(base.shape)

    def _chosen(self, base: Float[Array, "rows *out"], delta: Float[Array, "rows *out"]) -> Float[Array, "rows *out"]:
        """Return adapted rows, and rows without an adapter bitwise identical to ``base``."""
        assert self.rows is not None
        slots = self.rows.slots
        each = (self.magnitude, once(self.bias, self.axes))
        scale, offset = (None if one is None else one[slots] for one in each)
        has = (slots >= 0).reshape(-1, *[1] * (base.ndim - 1))
        # barrier: consumers must compile independently of this select, as in programs without adapters
        return lax.optimization_barrier(jnp.where(has, _combined(base, delta, scale, offset), base))

    def added_in_tiles(
        self, x: Float[Array, "tiles rows k"], base: Float[Array, "tiles rows *n"], groups: Groups
    ) -> Float[Array, "tiles rows *n"]:
        """Apply the adapters of experts to the product of their tiles' rows."""
        if self.a is None:
            return lax.optimization_barrier(base)
        if self.rows is None:
            delta = grouped.matmul(grouped.matmul(x, self.a, groups), self.b, groups)
            bias = once(self.bias, self.axes)
            each = (None if one is None else groups.of_tiles(one) for one in (self.magnitude, bias))
            return _combined(base, delta, *each)
        (count, experts), tokens = self.a.shape[:2], self.rows.slots.shape[0]
        top_k = groups.places.shape[0] // tokens
        slots = self.rows.slots.at[groups.entries // top_k].get(mode="fill", fill_value=-1)
        owners = jnp.arange(x.shape[0]) if groups.experts is None else groups.experts
        pairs = jnp.where(slots >= 0, slots * experts + owners[:, None], -1).reshape(-1)
        names = ("a", "b", "magnitude", "bias")
        flat = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in flat.items()}
        rows = Rows(pairs, lora.group(pairs, count * experts, most=tokens))
        of_pairs = dataclasses.replace(self, rows=rows, **flat)
        result = of_pairs.added(x.reshape(-1, x.shape[-1]), base.reshape(-1, *base.shape[2:]))
        return result.reshape(base.shape)

    def added_to_taken(self, ids: Int[Array, "*batch"], base: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """Apply the adapters to looked-up rows of a table."""
        if self.a is None:
            return lax.optimization_barrier(base)
        if self.rows is not None:
            flat, own = ids.reshape(-1), lax.optimization_barrier(base).reshape(-1, base.shape[-1])
            delta = spread_lookup(flat, self.a, self.b, self.rows.slots, self.rows.groups, self.axes)
            return self._chosen(own, delta).reshape(base.shape)
        hidden = jnp.moveaxis(jnp.take(self.a, ids, axis=-1, mode="clip"), 0, -1).astype(base.dtype)
        return _combined(base, _dot(hidden, self.b), self.magnitude, self.bias)


def slots_of(weight: Any) -> Int[Array, " rows"] | None:
    """Return the adapter slot of each row; None if the weight has no bank."""
    return weight.rows.slots if isinstance(weight, LoRAWeight) and weight.rows is not None else None


def for_rows(weight: Any, slots: Int[Array, " rows"]) -> Any:
    """Return expert weights for other rows than those of the step, which the experts tile themselves."""
    if slots_of(weight) is None:
        return weight
    return dataclasses.replace(weight, rows=weight.rows._replace(slots=slots))


def unadapted(weight: Any) -> Any:
    """Return the weight without its adapters."""
    return weight.base if isinstance(weight, LoRAWeight) else weight


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """Contract the last dimensions of both operands."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, w.astype(x.dtype), (((x.ndim - 1,), (w.ndim - 1,)), ((), ())), precision=precision)


def _combined(base: jax.Array, delta: jax.Array, magnitude: Any, bias: Any) -> jax.Array:
    """Combine in float32; return the dtype of ``base``."""
    total = base.astype(jnp.float32) + delta.astype(jnp.float32)
    total = total if magnitude is None else total * magnitude
    total = total if bias is None else total + bias
    return total.astype(base.dtype)
