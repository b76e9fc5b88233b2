"""Low-rank product in XLA: two grouped products over tiles of one adapter each; on a CPU see `cpu`."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels import grouped_matmul as grouped
from pallas_kernels.choice import Target, lowering_target
from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.lora import cpu


def low_rank(
    x: Float[Array, "rows k"],
    a: Float[Array, "slots rank k"],
    b: Float[Array, "slots *n rank"],
    groups: Groups,
    slots: cpu.BySlot | None = None,
    *,
    target: Target | None = None,
) -> Float[Array, "rows *n"]:
    """See `api.low_rank`.

    Args:
        target: lowering target of the program; None: see `pallas_kernels.choice`.
    """
    if (target or lowering_target()).platform == "cpu":
        flat = b.reshape(b.shape[0], -1, b.shape[-1])
        return _on_cpu(x, a.astype(x.dtype), flat.astype(x.dtype), groups, slots).reshape(-1, *b.shape[1:-1])
    return _in_two(x, a, b, groups, target)


def _in_two(x: jax.Array, a: jax.Array, b: jax.Array, groups: Groups, target: Target | None) -> jax.Array:
    hidden = grouped.matmul(grouped.taken(x, groups.entries), a, groups, path="xla", target=target)
    delta: jax.Array = grouped.matmul(hidden, b, groups, path="xla", target=target)
    return grouped.taken(delta.reshape(-1, *b.shape[1:-1]), groups.places)


@jax.custom_vjp
def _on_cpu(x: jax.Array, a: jax.Array, b: jax.Array, groups: Groups, slots: cpu.BySlot | None) -> jax.Array:
    return cpu.low_rank(x, a, b, groups, slots)


def _forward(x: jax.Array, a: jax.Array, b: jax.Array, groups: Groups, slots: cpu.BySlot | None) -> tuple[Any, Any]:
    """Differentiate `_in_two` instead: a loop with a dynamic trip count has no gradient."""
    return jax.vjp(lambda x, a, b: _in_two(x, a, b, groups, Target("cpu")), x, a, b)


def _backward(pullback: Any, change: jax.Array) -> tuple[Any, ...]:
    return *pullback(change), None, None


_on_cpu.defvjp(_forward, _backward)
