"""Hidden states spread over tokens: each device has some tokens' residual stream, and computes the norms of those.

Sequence parallelism as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2). What attention and the
feed-forward layer give is a sum over devices. Where each device keeps its own tokens of that sum alone, it is a
reduce-scatter in place of an all-reduce, and what goes into the next matrix is gathered of all.

Both functions are identities, except in programs that are traced for it (`tokens_spread`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.parallel.mesh import RULES

_AXIS = "tokens"


@contextlib.contextmanager
def tokens_spread(wanted: bool = True) -> Iterator[None]:
    """Spread hidden states over tokens in what this thread traces while the context lasts, if that is ``wanted``.

    The devices must divide the tokens (`jaxinfer.config.resolve` sees to it).
    """
    rules = nn.get_logical_axis_rules()
    with nn.logical_axis_rules((*rules, (_AXIS, RULES[_AXIS])) if wanted else rules):
        yield


def own_tokens(x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
    """Spread tokens between the parts of a layer: each device has some of them, whole."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(RULES[_AXIS])) if _traced_spread() else x


def all_tokens(x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
    """Replicate tokens for a product with a matrix: every device has all of them."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec()) if _traced_spread() else x


def _traced_spread() -> bool:
    """Whether the traced program spreads tokens: not within `jax.shard_map`, where a device computes for itself."""
    mesh, wanted = jax.sharding.get_abstract_mesh(), _AXIS in dict(nn.get_logical_axis_rules())
    return wanted and mesh.size > 1 and not set(mesh.manual_axes) & set(RULES[_AXIS])
