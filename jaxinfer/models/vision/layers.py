"""Layers of vision transformers: attention within the segments of an image, and the blocks of a tower."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import MLP, GatedMLP
from jaxinfer.layers.norm import LayerNorm, RMSNorm
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, map_specs
from pallas_kernels.choice import lowering_target

PADDING = -1
"""Segment of rows that pad an image to the rows of a program."""

_WHOLE, _WHOLE_CPU = 1024, 512
"""Most rows whose scores are computed at once; more are computed in blocks of queries, to bound the memory, and for the
caches of a CPU."""
_BLOCK, _MULTIPLE = 256, 8
"""Most queries of a block, and what their number is a multiple of."""


def within(segments: Int[Array, " rows"], reach: int | None = None) -> Attend:
    """Return an attention backend where each row attends to the rows of its own segment, in both directions.

    Args:
        segments: consecutive rows have the same number; `PADDING`: rows that are no part of the image.
        reach: the most rows of a segment, where few are: each block of queries scores only the keys near it.
    """

    def mixed(q: Array, k: Array, v: Array, scored: Callable[..., Array]) -> Array:
        if q.shape[0] <= (_WHOLE_CPU if _on_cpu() else _WHOLE):
            return scored(q, k, v, segments, segments)
        return _by_block(q, k, v, segments, scored, reach)

    def attend(
        q: Float[Array, "rows heads head_dim"],
        k: Float[Array, "rows heads head_dim"] | None,
        v: Float[Array, "rows heads head_dim"] | None,
        cache: Any,
        layer: LayerSpec,
        scale: float,
        sinks: Float[Array, " heads"] | None = None,
        chosen: Any = None,
    ) -> tuple[Float[Array, "rows heads head_dim"], Any]:
        assert k is not None
        assert v is not None
        scored = functools.partial(_scored, scale=scale)
        if not _on_cpu():
            return mixed(q, k, v, jax.vmap(scored, (1, 1, 1, None, None), 1)), cache
        # XLA would transpose the operands of each block's products.
        by_head = (jnp.swapaxes(x, 0, 1) for x in (q, k, v))
        return jnp.swapaxes(jax.vmap(functools.partial(mixed, scored=scored))(*by_head), 0, 1), cache

    return attend


def _on_cpu() -> bool:
    return lowering_target().platform == "cpu"


def _by_block(q: Array, k: Array, v: Array, segments: Array, scored: Callable[..., Array], reach: int | None) -> Array:
    """Compute blocks of queries one after another, or at once with only the keys within ``reach`` of the block."""
    rows = q.shape[0]
    blocks = math.ceil(rows / _BLOCK)
    size = math.ceil(rows / blocks / _MULTIPLE) * _MULTIPLE
    excess = blocks * size - rows

    def padded(x: Array, margin: int, value: int = 0) -> Array:
        return jnp.pad(x, [(margin, margin + excess), *[(0, 0)] * (x.ndim - 1)], constant_values=value)

    queries, keys = (padded(q, 0), padded(segments, 0, PADDING)), [k, v, segments]
    if reach is not None:
        keys = [padded(k, reach), padded(v, reach), padded(segments, reach, PADDING)]

    def block(first: Array) -> Array:
        own, of_query = (lax.dynamic_slice_in_dim(x, first, size) for x in queries)
        seen = keys if reach is None else [lax.dynamic_slice_in_dim(x, first, size + 2 * reach) for x in keys]
        return scored(own, seen[0], seen[1], of_query, seen[2])

    # The few keys of windows are scored at once: a loop is some launches a block, and a copy that the host waits for.
    each = functools.partial(lax.map, block) if reach is None else jax.vmap(block)
    found = each(jnp.arange(blocks) * size)
    return found.reshape(-1, *q.shape[1:])[:rows]


def _scored(
    q: Float[Array, "queries head_dim"],
    k: Float[Array, "keys head_dim"],
    v: Float[Array, "keys head_dim"],
    of_query: Int[Array, " queries"],
    of_key: Int[Array, " keys"],
    scale: float,
) -> Float[Array, "queries head_dim"]:
    """Attend with one head."""
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = product("qd,kd->qk", q, k) * scale
    scores = jnp.where(of_query[:, None] == of_key[None, :], scores, jnp.finfo(scores.dtype).min)
    if not _on_cpu():
        weights = jax.nn.softmax(scores).astype(v.dtype)
        # In this order, or the transposition to rows of heads is a kernel.
        return jnp.einsum("kd,qk->dq", v, weights, precision=precision).T
    # The normaliser is one more column of the product: so the weights have one use, and XLA fuses all but the scores.
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True))).astype(v.dtype)
    sums = product("qk,kd->qd", weights, jnp.concatenate([v, jnp.ones_like(v[:, :1])], axis=1))
    return (sums[:, :-1] / sums[:, -1:]).astype(v.dtype)


class TowerBlock(Layer):
    """A layer of a vision transformer: attention and a feed-forward layer, each after a norm.

    Attributes:
        rms: the norms are `RMSNorm`, not `LayerNorm`.
        gated: the feed-forward layer is `GatedMLP`.
        bias: the projections have biases.
    """

    heads: int
    head_dim: int
    activation: str
    eps: float
    rms: bool = False
    gated: bool = False
    bias: bool = True

    def setup(self) -> None:
        norm = RMSNorm if self.rms else LayerNorm
        self.attention_norm, self.mlp_norm = norm(self.eps), norm(self.eps)
        self.attention = Attention(self.heads, self.heads, self.head_dim, LayerSpec(), self.bias, self.bias)
        self.mlp = (GatedMLP if self.gated else MLP)(self.activation, self.bias)

    def __call__(
        self, x: Float[Array, "rows d"], rope: tuple[jax.Array, jax.Array] | None, attend: Attend
    ) -> Float[Array, "rows d"]:
        x = x + self.attention(self.attention_norm(x), rope, attend, None)[0]
        return x + self.mlp(self.mlp_norm(x))


def replicated(tree: ParamTree) -> dict[str, Any]:
    """Return the parameters of a tower without logical axes: every device has all of them."""

    def spec(_: tuple[str, ...], given: ParamSpec) -> ParamSpec:
        return dataclasses.replace(given, axes=(None,) * len(given.axes))

    found: dict[str, Any] = map_specs(spec, tree)
    return found
