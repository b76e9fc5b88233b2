"""Quantised weights in the layout that GPU kernels read, and the kernel product of expert stacks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.quant.ggml import E2M1_VALUES
from jaxinfer.quant.layouts import Codebook, Float4, Grouped
from jaxinfer.quant.storage import Quantized, map_stored, rounds_tokens
from jaxinfer.types import ParamSpec
from pallas_kernels import quant_matmul
from pallas_kernels.choice import Choice, Wish
from pallas_kernels.grouped_matmul import Groups

_MXFP4 = Codebook(E2M1_VALUES, Float4().group, "float8_e8m0fnu")


def for_kernels(tree: Any, gemm: Wish = "xla") -> Any:
    """Return a tree of parameters or specs in the layout that GPU kernels read without rearranging anything.

    Lookup tables stay as they are, and so do weights with rounded inputs, whose products take the path ``gemm``
    (`Quantized.path`), except those of experts.
    """
    return map_stored(functools.partial(_for_kernels, gemm=gemm), tree)


def _for_kernels(weight: Quantized, gemm: Wish) -> Quantized:
    layout, arrays = weight.layout, dict(weight.arrays)
    if "vocab" in weight.axes:
        return weight
    if layout == _MXFP4:
        arrays = {"codes": _in_order(arrays["codes"]), "scales": _groups_first(_as_exponents(arrays["scales"]))}
        return dataclasses.replace(weight, arrays=arrays, layout=Float4())
    if not isinstance(layout, Grouped) or layout.groups_first:
        return weight
    if layout.activations:
        return _by_gemm(weight, gemm) if rounds_tokens(weight) else weight
    if layout.group == weight.inputs and "expert" not in weight.axes:
        return weight
    own = {name: _groups_first(arrays[name]) for name in layout.parts(weight.inputs) if name != "codes"}
    return dataclasses.replace(weight, arrays=arrays | own, layout=dataclasses.replace(layout, groups_first=True))


def _by_gemm(weight: Quantized, gemm: Wish) -> Quantized:
    """Set the GEMM path; scales become float32, as the kernel would otherwise convert them in every step."""
    assert isinstance(weight.layout, Grouped)
    if gemm == "xla":
        return weight
    arrays = dict(weight.arrays) | {"scales": _of_dtype(weight.arrays["scales"], "float32")}
    layout = dataclasses.replace(weight.layout, scales="float32")
    return dataclasses.replace(weight, arrays=arrays, layout=layout, path=gemm)


def _groups_first(array: Any) -> Any:
    """Move the last axis of an array, a `ParamSpec` or a `jax.ShapeDtypeStruct` to the front."""
    if isinstance(array, ParamSpec):
        shape, axes = (array.shape[-1], *array.shape[:-1]), (array.axes[-1], *array.axes[:-1])
        return dataclasses.replace(array, shape=shape, axes=axes, sources=())
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((array.shape[-1], *array.shape[:-1]), array.dtype)
    return jnp.moveaxis(array, -1, 0)


def _in_order(codes: Any) -> Any:
    """Return the codes of a `Float4`, in one program: step by step would take several times the memory of a stack."""
    return jax.jit(quant_matmul.placed)(codes) if isinstance(codes, jax.Array) else _of_dtype(codes, "int4")


def _as_exponents(scales: Any) -> Any:
    if isinstance(scales, jax.Array):
        return jax.lax.bitcast_convert_type(scales, jnp.uint8)
    return _of_dtype(scales, "uint8")


def _of_dtype(array: Any, dtype: str) -> Any:
    if isinstance(array, jax.Array):
        return array.astype(dtype)
    if isinstance(array, ParamSpec):
        return dataclasses.replace(array, dtype=dtype, sources=())
    return jax.ShapeDtypeStruct(array.shape, jnp.dtype(dtype))


# --------------------------------------------------------------------------------------------------------------
# Stacks of experts.


class _Stack(NamedTuple):
    """A stack of weights as arguments of `quant_matmul.matmul_tiles`."""

    weights: Any  # [experts, n, k]
    scales: Any  # [groups, experts, n]
    zeros: Any
    e2m1: bool


def explain_tiles(dtype: Any, weight: Quantized) -> Choice | None:
    """Return the path of `tiles_product` for rows of a dtype; None if the kernel does not support the layout."""
    stack = _stack_of(weight)
    if stack is None:
        return None
    x = jax.ShapeDtypeStruct((1, stack.weights.shape[-1]), dtype)
    return quant_matmul.explain_tiles(x, *stack[:3], e2m1=stack.e2m1)


def tiles_product(
    x: Float[Array, "tiles rows k"], weight: Quantized, groups: Groups
) -> Float[Array, "tiles rows *n"] | None:
    """Multiply each tile's rows by the weights of the tile's expert; None if the kernel does not support the layout."""
    stack = _stack_of(weight)
    if stack is None:
        return None
    result = quant_matmul.matmul_tiles(x, *stack[:3], groups, e2m1=stack.e2m1)
    return result.reshape(*x.shape[:2], *weight.arrays["codes"].shape[1:-1])


def _stack_of(weight: Quantized) -> _Stack | None:
    layout = weight.layout
    if not isinstance(layout, Float4) and not (isinstance(layout, Grouped) and _plainly_grouped(layout)):
        return None
    codes = weight.arrays["codes"]
    experts, inputs = codes.shape[0], codes.shape[-1]

    def by_group(name: str) -> Array:
        array: Array = weight.arrays[name]
        return array.reshape(array.shape[0], experts, -1)

    scales = by_group("scales")
    if isinstance(layout, Grouped) and layout.factor != 1.0:
        scales = scales.astype(jnp.float32) * layout.factor
    zeros = by_group("zeros") if "zeros" in weight.arrays else None
    return _Stack(codes.reshape(experts, -1, inputs), scales, zeros, isinstance(layout, Float4))


def _plainly_grouped(layout: Grouped) -> bool:
    return layout.groups_first and not (layout.activations or layout.biased or layout.ordered)
