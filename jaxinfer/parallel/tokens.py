"""Hidden states sharded over tokens: each device has the residual stream of some tokens, and computes their norms.

Sequence parallelism as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2). The outputs of attention and of
the feed-forward layer are sums over devices. If each device keeps only its own tokens of that sum, a reduce-scatter
replaces the all-reduce, and the input of the next matrix is all-gathered.

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
    """Shard hidden states over tokens in programs that this thread traces within the context, if that is ``wanted``.

    The number of tokens must be divisible by the devices (`jaxinfer.config.resolve` ensures it).
    """
    rules = nn.get_logical_axis_rules()
    with nn.logical_axis_rules((*rules, (_AXIS, RULES[_AXIS])) if wanted else rules):
        yield


def own_tokens(x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
    """Shard tokens between the sublayers of a layer: each device has the full hidden states of some tokens."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(RULES[_AXIS])) if _traced_spread() else x


def all_tokens(x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens d"]:
    """Replicate tokens for a product with a matrix: every device has all of them."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec()) if _traced_spread() else x


def _traced_spread() -> bool:
    """Return whether the traced program shards tokens; not within `jax.shard_map`, where devices compute alone."""
    mesh, wanted = jax.sharding.get_abstract_mesh(), _AXIS in dict(nn.get_logical_axis_rules())
    return wanted and mesh.size > 1 and not set(mesh.manual_axes) & set(RULES[_AXIS])
