"""Quantised weights that replace arrays: `Quantized`, with one layout, and `Split`, with several for a fused weight.

Both are pytrees and are never fully dequantized in memory: a product dequantizes some outputs at a time, or uses a
kernel. A tree of parameter specs has the same nodes, with specs as leaves (`jaxinfer.types.ParamTree`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, ItemsView, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.parallel.mesh import RULES, spread_over
from jaxinfer.quant import activations
from jaxinfer.quant.layouts import Float4, Grouped, Layout, Part
from jaxinfer.quant.lora_weight import LoRAWeight
from jaxinfer.quant.sharded import is_spread
from jaxinfer.quant.unquantized import Unquantized
from pallas_kernels import quant_matmul
from pallas_kernels.choice import Wish, lowering_target
from pallas_kernels.quant_matmul.xla import in_pieces

CHANNELS = 256  # outputs dequantized at a time


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["layout", "axes", "dtype", "inputs", "path"]
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A weight ``[*out, in]`` in a layout.

    Attributes:
        arrays: parts and input parts by name; in a tree of specs, a `ParamSpec` for each.
        layout: the meaning of the arrays.
        axes: logical axes of ``[*out, in]``.
        dtype: name of the dtype of dequantized values if nothing else sets it.
        inputs: number of inputs, over all devices.
        path: kernel choice as in `Unquantized.path`, for products of inputs rounded with one scale per token by weights
            with one scale per channel.
    """

    arrays: Mapping[str, Any]
    layout: Layout
    axes: tuple[str | None, ...]
    dtype: str
    inputs: int
    path: Wish = "xla"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, ``[*out, in]``."""
        name = next(iter(self._parts))
        return (*self.arrays[name].shape[: len(self.axes) - 1], self.inputs)

    @property
    def _parts(self) -> dict[str, Part]:
        return self.layout.parts(self.inputs)

    @property
    def _input_parts(self) -> dict[str, Part]:
        return self.layout.input_parts(self.inputs)

    def items(self) -> ItemsView[str, Any]:
        return self.arrays.items()

    def rebuilt(self, arrays: Mapping[str, Any]) -> Quantized:
        """Return a copy with other leaves."""
        return dataclasses.replace(self, arrays=dict(arrays))

    def dequantize(self) -> Float[Array, "*out k"]:
        """Return the whole weight in float32: for debugging, tests and operations without a quantised product."""
        weight = self.layout.dequantize(self._only(self._parts))
        if "order" not in self.arrays:
            return weight
        return jnp.take(weight, jnp.argsort(self.arrays["order"]), axis=-1)

    def take(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch k"]:
        """Return rows of a table ``[rows, in]``."""
        rows = {name: jnp.take(array, ids, axis=0, mode="clip") for name, array in self._only(self._parts).items()}
        return self.rebuilt({**rows, **self._only(self._input_parts)}).dequantize().astype(self.dtype)

    def gated_by_kernel(self, x: Any) -> bool:
        """Return whether a kernel computes silu(gate) * up of products with inputs like ``x``; outputs are [2, n]."""
        layout = self.layout
        return isinstance(layout, Grouped) and activations.by_gemm(x, layout, self.arrays, self.path, gated=True)

    def matmul(self, x: Float[Array, "*rows k"], *, gated: bool = False) -> Float[Array, "*rows *out"]:
        """Return the product with the transposed weight in the dtype of ``x``; ``gated`` needs `gated_by_kernel`."""
        flat, weight = self._in_order(x.reshape(-1, x.shape[-1]))
        result = weight._spread(flat, gated) if is_spread() else _product(flat, weight, gated)
        return result.reshape(*x.shape[:-1], *self.shape[gated:-1])

    def _in_order(self, x: Float[Array, "rows k"]) -> tuple[Float[Array, "rows k"], Quantized]:
        """Return the inputs permuted to the order of the columns, and the weight without an ``order``."""
        if "order" not in self.arrays:
            return x, self
        assert isinstance(self.layout, Grouped)
        arrays = {name: array for name, array in self.arrays.items() if name != "order"}
        layout = dataclasses.replace(self.layout, ordered=False)
        if lowering_target().platform == "cpu":
            # XLA:CPU gathers in a loop over rows. Arithmetic fused into it would round the rows that do not fill a
            # vector register otherwise than the others. A GPU's threads compute elements: there fusion saves a launch.
            x = lax.optimization_barrier(x)
        return jnp.take(x, self.arrays["order"], axis=-1), dataclasses.replace(self, arrays=arrays, layout=layout)

    def _spread(self, x: Float[Array, "rows k"], gated: bool) -> Float[Array, "rows *out"]:
        """Multiply by each device's shard of the weight; partial products of sharded inputs are summed."""
        *outs, along = spread_over(self.axes, self.shape)
        assert not (gated and along)  # the gate applies only after the sum

        def own(x: jax.Array, weight: Quantized) -> jax.Array:
            part = _product(x, weight, gated).reshape(x.shape[0], *weight.shape[gated:-1])
            return lax.psum(part, along) if along else part

        specs = (PartitionSpec(None, along), self.partition())
        run = jax.shard_map(own, in_specs=specs, out_specs=PartitionSpec(None, *outs[gated:]), check_vma=False)
        result: jax.Array = run(x, self)
        return result

    def partition(self) -> Any:
        """Replace each array by its `PartitionSpec` on the mesh of the traced program."""
        *outs, along = spread_over(self.axes, self.shape)
        own = {name: _partition(part, outs, along) for name, part in self._parts.items()}
        shared = {
            name: PartitionSpec(*((along,) if part.along and part.shape else ()))
            for name, part in self._input_parts.items()
        }
        return self.rebuilt({**own, **shared})

    def expert(self, index: Int[Array, ""] | int) -> Quantized:
        """Return one weight of a stack ``[experts, *out, in]``."""
        arrays = dict(self.arrays)
        for name, part in self._parts.items():
            axis = len(part.shape) if part.first else 0
            arrays[name] = lax.dynamic_index_in_dim(arrays[name], index, axis, keepdims=False)
        return dataclasses.replace(self, arrays=arrays, axes=self.axes[1:])

    def _only(self, names: Mapping[str, Part]) -> dict[str, Any]:
        return {name: self.arrays[name] for name in names}


def _partition(part: Part, outs: Sequence[Any], along: Any) -> PartitionSpec:
    own = (along if part.along else None,) if part.shape else ()
    return PartitionSpec(*own, *outs) if part.first else PartitionSpec(*outs, *own)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["pieces"], meta_fields=["axis"])
@dataclasses.dataclass(frozen=True)
class Split:
    """A weight ``[*out, in]`` stored in several ways along ``axis`` of its outputs.

    Attributes:
        pieces: `Quantized` or arrays ``[*out, in]``.
    """

    pieces: tuple[Any, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [piece.shape for piece in self.pieces]
        whole = sum(shape[self.axis] for shape in shapes)
        return (*shapes[0][: self.axis], whole, *shapes[0][self.axis + 1 :])

    def items(self) -> ItemsView[str, Any]:
        return {str(index): piece for index, piece in enumerate(self.pieces)}.items()

    def rebuilt(self, pieces: Mapping[str, Any]) -> Split:
        return dataclasses.replace(self, pieces=tuple(pieces.values()))

    def dequantize(self) -> Float[Array, "*out k"]:
        return jnp.concatenate([dense(piece) for piece in self.pieces], axis=self.axis)

    def matmul(self, x: Float[Array, "*rows k"], product: Callable[[Any, Any], Array]) -> Float[Array, "*rows *out"]:
        """Multiply by each piece and concatenate; ``product`` is `dispatch.matmul_transposed`."""
        parts = [product(x, piece) for piece in self.pieces]
        return jnp.concatenate(parts, axis=x.ndim - 1 + self.axis)

    def expert(self, index: Int[Array, ""] | int) -> Split:
        pieces = tuple(
            piece.expert(index)
            if isinstance(piece, Quantized)
            else lax.dynamic_index_in_dim(piece, index, keepdims=False)
            for piece in self.pieces
        )
        return Split(pieces, self.axis - 1)


def partition(weight: Any, plain: PartitionSpec) -> Any:
    """Return the partition of a weight on the mesh of the traced program: ``plain``, or one for each stored array."""
    if isinstance(weight, LoRAWeight):
        return weight.partition(partition(weight.base, plain))
    if isinstance(weight, Split):
        return dataclasses.replace(weight, pieces=tuple(partition(piece, plain) for piece in weight.pieces))
    return weight.partition() if isinstance(weight, Quantized | Unquantized) else plain


def is_stored(node: Any) -> bool:
    """Return whether a node of a tree of parameters or specs is a weight storage and not an array."""
    return isinstance(node, Quantized | Split | Unquantized)


def with_values(tree: Any, dtype: str) -> Any:
    """Return a tree of parameters or specs whose quantised weights dequantize to another dtype."""
    return map_stored(lambda weight: dataclasses.replace(weight, dtype=dtype), tree)


def with_activations(tree: Any, kind: str) -> Any:
    """Return a tree of parameters or specs with other `Grouped.activations` where weights allow it.

    Args:
        kind: "none"; "int8" or "fp8": for weights of that dtype; int8 weights also need one scale per channel.
    """

    def changed(weight: Quantized) -> Quantized:
        layout = weight.layout
        if not isinstance(layout, Grouped):
            return weight
        if kind == "none":
            return dataclasses.replace(weight, layout=dataclasses.replace(layout, activations=""))
        if layout.codes != _KINDS[kind] or (
            kind == "int8" and (layout.group != weight.inputs or layout.zeros or layout.biased)
        ):
            return weight
        own = 0 if layout.group == weight.inputs else layout.group
        return dataclasses.replace(
            weight,
            layout=dataclasses.replace(layout, activations=_KINDS[kind], activation_group=own, int8_steps=_STEPS),
        )

    return map_stored(changed, tree)


_KINDS = {"int8": "int8", "fp8": "float8_e4m3fn"}
_STEPS = 127.0  # unlike 127.5, insensitive to last-bit differences between programs


def rounds_activations(tree: Any) -> bool:
    """Return whether inputs of any weight in a tree are rounded."""
    layouts = (node.layout for node in jax.tree.leaves(tree, is_leaf=_is_quantized) if _is_quantized(node))
    return any(layout.activations for layout in layouts if isinstance(layout, Grouped))


def rounds_tokens(weight: Quantized) -> bool:
    """Return whether `Quantized.path` affects the products of a weight."""
    layout = weight.layout
    if not isinstance(layout, Grouped) or layout.activations != layout.codes or layout.zeros or "expert" in weight.axes:
        return False
    return layout.group == weight.inputs and layout.activation_group in (0, weight.inputs)


def map_stored(function: Callable[[Quantized], Quantized], tree: Any) -> Any:
    """Replace each `Quantized` of a tree of parameters or specs."""
    return jax.tree.map(lambda node: function(node) if _is_quantized(node) else node, tree, is_leaf=_is_quantized)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def dense(weight: Any) -> Float[Array, "*out k"]:
    """Return a stored weight dequantized, or an array as it is."""
    return weight.dequantize() if is_stored(weight) else weight


def _product(x: Float[Array, "rows k"], weight: Quantized, gated: bool) -> Float[Array, "rows *out"]:
    """Multiply by the local shard of a weight (the whole weight on one device)."""
    layout, arrays = weight.layout, weight.arrays
    if isinstance(layout, Grouped):
        # shards of the inputs share dynamic input scales
        along = None if x.shape[-1] == weight.inputs else RULES[weight.axes[-1] or ""]
        if layout.activations:
            return activations.product(x, layout, arrays, along, weight.path, gated=gated)
        return _grouped_product(x, layout, arrays)
    if isinstance(layout, Float4):
        codes, scales = arrays["codes"], arrays["scales"]
        flat = codes.reshape(-1, codes.shape[-1]), scales.reshape(scales.shape[0], -1)
        return quant_matmul.matmul(x, *flat, e2m1=True)
    return _by_channels(x, layout, {name: arrays[name] for name in layout.parts(weight.inputs)}, weight.shape[:-1])


def _grouped_product(x: Array, layout: Grouped, arrays: Mapping[str, Any]) -> Array:
    def by_group(name: str) -> Array:
        array: Array = arrays[name]
        return array.reshape(array.shape[0], -1) if layout.groups_first else array.reshape(-1, array.shape[-1]).T

    if layout.biased:
        plain = _grouped_product(x, dataclasses.replace(layout, biased=0), arrays).astype(jnp.float32)
        return (plain + _of_biases(x, by_group("biases"), by_group("scales"), layout.biased)).astype(x.dtype)
    codes, scales = arrays["codes"], by_group("scales")
    if layout.factor != 1.0:
        scales = scales.astype(jnp.float32) * layout.factor
    zeros = by_group("zeros") if layout.zeros else None
    return quant_matmul.matmul(x, codes.reshape(-1, codes.shape[-1]), scales, zeros)


def _of_biases(
    x: Float[Array, "rows k"], biases: Float[Array, "groups n"], scales: Float[Array, "groups n"], moved: int
) -> Float[Array, "rows n"]:
    """Return the contribution of group biases to a product: each times the sum of the group's inputs, in float32."""
    sums = x.astype(jnp.float32).reshape(x.shape[0], biases.shape[0], -1).sum(-1)
    whole = biases.astype(jnp.float32) + moved * scales.astype(jnp.float32)
    return lax.dot_general(sums, whole, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)


def _by_channels(x: Array, layout: Layout, parts: Mapping[str, Any], outs: tuple[int, ...]) -> Array:
    """Multiply by a few outputs at a time so that their dequantized weights stay in the cache; on a GPU without a loop:
    XLA may copy loop results on another stream, which a loop inside a command buffer does not support."""
    flat = {name: array.reshape(-1, *array.shape[len(outs) :]) for name, array in parts.items()}
    channels = math.prod(outs)

    def plain(stored: Any, own: slice) -> Array:
        return layout.dequantize({name: array[own] for name, array in stored.items()})

    if lowering_target().platform != "cpu":
        return in_pieces(x, flat, channels, plain)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT

    def chunk(first: Any, size: int) -> Array:
        own = {name: lax.dynamic_slice_in_dim(array, first, size) for name, array in flat.items()}
        weight = layout.dequantize(own).astype(x.dtype)
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision)

    size = min(CHANNELS, channels)
    whole = channels // size
    result = jnp.moveaxis(lax.map(lambda i: chunk(i * size, size), jnp.arange(whole)), 0, 1)
    result = result.reshape(x.shape[0], whole * size)
    if channels % size:
        result = jnp.concatenate([result, chunk(whole * size, channels % size)], axis=1)
    return result
