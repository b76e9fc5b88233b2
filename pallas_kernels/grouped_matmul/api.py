"""The door of grouped_matmul: plain XLA on every platform."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.choice import Target
from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.reference import check


def matmul(
    x: Float[Array, "tiles rows k"],
    weights: Float[Array, "experts *n k"],
    groups: Groups,
    *,
    target: Target | None = None,
) -> Float[Array, "tiles rows *n"]:
    """Each tile's rows times the transposed weights of the tile's expert, in the dtype of ``x``.

    Tiles that hold nothing give zeros, or what their zero rows give. float32 means float32: no TF32. It can be
    differentiated in reverse.

    Args:
        x: zeros in the rows that hold no entry.
        weights: outputs by inputs, of every expert.
        groups: `group`'s.
        target: what the program is lowered for; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    check(x, weights)
    flat = weights.reshape(weights.shape[0], -1, weights.shape[-1])
    result = xla.matmul(x, flat, groups, target=target)
    return result.reshape(*x.shape[:2], *weights.shape[1:-1])
