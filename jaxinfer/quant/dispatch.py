"""Dispatch of weight reads in a forward pass by storage type. A new storage adds its case here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.quant.activation_hooks import Observed
from jaxinfer.quant.kernel_form import explain_tiles, tiles_product
from jaxinfer.quant.lora_weight import LoRAWeight, unadapted
from jaxinfer.quant.storage import Quantized, Split
from jaxinfer.quant.unquantized import Unquantized
from pallas_kernels import grouped_matmul as grouped
from pallas_kernels import one_row
from pallas_kernels.choice import lowering_target
from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.sums import dot


def matmul(x: Float[Array, "... k"], w: Any, bias: Float[Array, "*n"] | None = None) -> Float[Array, "... *n"]:
    """Contract the last dimension of ``x`` with the inputs of ``w`` (first dimension of an array), in ``x``'s dtype.

    float32 means float32: no TF32 and no bfloat16 passes. ``bias`` is added to the rounded product (`plus_bias`), in
    the same launch if a kernel computes the product.
    """
    if bias is not None:
        if isinstance(w, Unquantized) and w.by_kernel(x):
            return w.matmul(x, bias)
        return plus_bias(matmul(x, w), bias)
    if isinstance(w, LoRAWeight):
        return w.added(x, matmul(x, w.base))
    if isinstance(w, Quantized | Split):
        return _stored(x, w)
    if isinstance(w, Unquantized):
        return _plain(x, w)
    if isinstance(w, Observed):
        w = w.against(x, "in first")
    return _product(x, w.astype(x.dtype), 0)


def matmul_transposed(x: Float[Array, "... k"], w: Any) -> Float[Array, "... *n"]:
    """Contract the last dimensions of both: for wide outputs whose weight is [out, in], like an embedding table."""
    if isinstance(w, LoRAWeight):
        result = matmul_transposed(x, w.base)
        return result if w.table else w.added(x, result)
    if isinstance(w, Quantized | Split):
        return _stored(x, w)
    if isinstance(w, Unquantized):
        return _plain(x, w)
    if isinstance(w, Observed):
        w = w.against(x, "in last")
    if w.ndim > 2 and jax.sharding.get_abstract_mesh().size > 1:
        # Merging dimensions of which the inner one is sharded would trigger an all-gather.
        return dot(x, w.astype(x.dtype), w.ndim - 1)
    # As a matrix: with more than one output dimension XLA:CPU transposes the whole weight at every call.
    flat = w.astype(x.dtype).reshape(-1, w.shape[-1])
    return _product(x, flat, 1).reshape(*x.shape[:-1], *w.shape[:-1])


def _product(x: jax.Array, w: jax.Array, along: int) -> jax.Array:
    count = one_row.slices(x.shape[-1], along) if one_row.alone(x, w) else None
    return dot(x, w, along) if count is None else one_row.dot(x, w, along, count)


def _stored(x: jax.Array, w: Quantized | Split) -> jax.Array:
    return w.matmul(x) if isinstance(w, Quantized) else w.matmul(x, matmul_transposed)


def _plain(x: jax.Array, w: Unquantized) -> jax.Array:
    if w.by_kernel(x):
        return w.matmul(x)
    return (matmul if w.layout == "in first" else matmul_transposed)(x, w.weight)


def swiglu(x: Float[Array, "... k"], w: Any) -> Float[Array, "... n"]:
    """Return silu(gate) * up of the product with ``w`` [2, n, k]: gate, then up (Shazeer 2020)."""
    if isinstance(w, Unquantized) and w.by_kernel(x, gated=True):
        return w.matmul(x, gated=True)
    if isinstance(w, Quantized) and w.gated_by_kernel(x):
        return w.matmul(x, gated=True)
    gate_up = matmul_transposed(x, w)
    gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
    return jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * up


def plus_bias(product: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """Add a bias to a product, after a barrier: fusing it into the product would depend on the product's other
    consumers, such as adapters of other rows."""
    return lax.optimization_barrier(product) + bias.astype(product.dtype)


def matmul_heads(x: Float[Array, "*batch heads k"], w: Float[Array, "heads k n"]) -> Float[Array, "*batch heads n"]:
    """Multiply each head's vector by that head's matrix."""
    if x.ndim > 2 and one_row.alone(x[..., 0, :], w):  # faster with a second row
        return matmul_heads(jnp.concatenate([x, jnp.zeros_like(x)]), w)[:1]
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    out = lax.dot_general(x, w.astype(x.dtype), (((x.ndim - 1,), (1,)), ((x.ndim - 2,), (0,))), precision=precision)
    return jnp.moveaxis(out, 0, -2)


def take(w: Any, ids: Int[Array, "*batch"]) -> Float[Array, "*batch d"]:
    """Return rows of a table. Ids must be in range: admission checks them."""
    if isinstance(w, LoRAWeight):
        return w.added_to_taken(ids, take(w.base, ids)) if w.table else take(w.base, ids)
    return w.take(ids) if isinstance(w, Quantized | Unquantized) else jnp.take(w, ids, axis=0, mode="clip")


def grouped_matmul(x: Float[Array, "tiles rows k"], w: Any, groups: grouped.Groups) -> Float[Array, "tiles rows *n"]:
    """Multiply each tile's rows by the weights of the tile's expert; weights are [experts, *n, k]."""
    if isinstance(w, LoRAWeight):
        return w.added_in_tiles(x, grouped_matmul(x, w.base, groups), groups)
    if isinstance(w, Quantized) and (product := tiles_product(x, w, groups)) is not None:
        return product
    if isinstance(w, Quantized | Split):
        return grouped_product(x, w, groups, _stored)
    if isinstance(w, Observed):
        w = w.against_tiles(x, groups)
    return grouped.matmul(x, w, groups)


def grouped_path(x: Float[Array, "... k"], *weights: Any) -> Literal["mosaic", "xla"]:
    """Return the path of `grouped_matmul` for inputs like ``x`` and all of these weights, which share their tiles."""
    return "mosaic" if all(_tiles_by_kernel(x, unadapted(w)) for w in weights) else "xla"


def _tiles_by_kernel(x: Float[Array, "... k"], w: Any) -> bool:
    if isinstance(w, Quantized):
        chosen = explain_tiles(x.dtype, w)
    elif isinstance(w, jax.Array):
        chosen = grouped.explain(jax.ShapeDtypeStruct((1, w.shape[-1]), x.dtype), w)
    else:  # `Split`: dequantized tile by tile
        return False
    return chosen is not None and chosen.path == "mosaic"


def grouped_product(
    x: Float[Array, "tiles rows k"], weights: Any, groups: Groups, product: Callable[[Any, Any], jax.Array]
) -> Float[Array, "tiles rows *n"]:
    """Multiply each tile's rows by the weights of the tile's expert, dequantized in chunks.

    On a CPU only occupied tiles are computed.

    Args:
        weights: a `Quantized` or `Split` of ``[experts, *n, k]``.
        product: the product of rows with one expert's weights.
    """

    def tile(index: Any) -> jax.Array:
        expert = index if groups.experts is None else groups.experts[index]
        return product(lax.dynamic_index_in_dim(x, index, keepdims=False), weights.expert(expert))

    tiles, rows = x.shape[:2]
    if groups.experts is None or lowering_target().platform != "cpu":
        return lax.map(tile, jnp.arange(tiles))

    def fill(index: Any, result: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(result, tile(index), index, 0)

    return lax.fori_loop(0, groups.occupied, fill, jnp.zeros((tiles, rows, *weights.shape[1:-1]), x.dtype))
