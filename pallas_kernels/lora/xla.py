"""A product of low rank in plain XLA: two grouped products, over tiles of one adapter each."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from pallas_kernels import grouped_matmul as grouped
from pallas_kernels.choice import Target
from pallas_kernels.grouped_matmul import Groups


def low_rank(
    x: Float[Array, "rows k"],
    a: Float[Array, "slots rank k"],
    b: Float[Array, "slots *n rank"],
    groups: Groups,
    *,
    target: Target | None = None,
) -> Float[Array, "rows *n"]:
    """See `api.low_rank`.

    Args:
        target: what the program is lowered for; None: see `pallas_kernels.choice`.
    """
    tiles = x.at[groups.entries].get(mode="fill", fill_value=0)
    hidden = grouped.matmul(tiles, a, groups, path="xla", target=target)
    delta: jax.Array = grouped.matmul(hidden, b, groups, path="xla", target=target)
    return delta.reshape(-1, *b.shape[1:-1]).at[groups.places].get(mode="fill", fill_value=0)
