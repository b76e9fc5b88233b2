"""`Unquantized`: an unquantized weight with an explicit layout and kernel choice."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import ItemsView, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.parallel.mesh import spread_over
from jaxinfer.quant.sharded import is_spread
from jaxinfer.types import ParamSpec
from pallas_kernels import matmul as dense_matmul
from pallas_kernels.choice import HOPPER, Target, Wish, lowering_target
from pallas_kernels.matmul import Extras, Layout

_CPUINFO = pathlib.Path("/proc/cpuinfo")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["layout", "axes", "path"])
@dataclasses.dataclass(frozen=True)
class Unquantized:
    """An unquantized weight that replaces an array.

    Attributes:
        weight: the array; in a tree of specs, its `ParamSpec`.
        layout: "in first", ``[in, *out]``, or "in last", ``[*out, in]``.
        axes: logical axes of ``[*out, in]`` for both layouts.
        path: "xla"; "auto": the kernel of `pallas_kernels.matmul` where it was measured to be faster on this GPU;
            "mosaic": the kernel wherever it is supported.
    """

    weight: Any
    layout: Layout
    axes: tuple[str | None, ...]
    path: Wish = "auto"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as ``[*out, in]``, like quantised weights."""
        shape = tuple(self.weight.shape)
        return (*shape[1:], shape[0]) if self.layout == "in first" else shape

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    @property
    def size(self) -> int:
        return math.prod(self.weight.shape)

    def items(self) -> ItemsView[str, Any]:
        return {"weight": self.weight}.items()

    def rebuilt(self, arrays: Mapping[str, Any]) -> Unquantized:
        """Return a copy with another leaf."""
        return dataclasses.replace(self, **arrays)

    def dequantize(self) -> Float[Array, "*out k"]:
        """Return the weight in float32, outputs first."""
        weight: Array = self.weight.astype(jnp.float32)
        return jnp.moveaxis(weight, 0, -1) if self.layout == "in first" else weight

    def take(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch k"]:
        """Return rows of a table ``[rows, in]``."""
        return jnp.take(self.weight, ids, axis=0, mode="clip")

    def by_kernel(self, x: Any, weight: Any = None, *, gated: bool = False) -> bool:
        """Return whether a kernel computes products with inputs like ``x``; ``weight``: one device's shard."""
        weight = self.weight if weight is None else weight
        if self.path == "xla" or x.dtype != weight.dtype:
            return False
        row = jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype)
        chosen = dense_matmul.explain(row, weight, layout=self.layout, gated=gated, measured=self.path == "auto")
        return chosen.path == "mosaic"

    def matmul(
        self, x: Float[Array, "*rows k"], bias: Float[Array, "*out"] | None = None, *, gated: bool = False
    ) -> Float[Array, "*rows *out"]:
        """Return the kernel's product in the dtype of ``x``; ``gated``: silu(gate) * up of outputs [2, n]."""
        flat = x.reshape(-1, x.shape[-1])
        result = self._spread(flat, bias, gated) if is_spread() else self._product(flat, self.weight, bias, gated)
        return result.reshape(*x.shape[:-1], *self.shape[gated:-1])

    def partition(self) -> Unquantized:
        """Replace the array by its `PartitionSpec` on the mesh of the traced program."""
        *outs, along = spread_over(self.axes, self.shape)
        return dataclasses.replace(
            self, weight=PartitionSpec(along, *outs) if self.layout == "in first" else PartitionSpec(*outs, along)
        )

    def _product(self, x: Float[Array, "rows k"], weight: Array, bias: Any, gated: bool) -> Float[Array, "rows *out"]:
        path: Wish = "mosaic" if self.by_kernel(x, weight, gated=gated) else "xla"
        extras = Extras(bias=None if bias is None else bias.astype(x.dtype))
        return dense_matmul.matmul(x, weight.astype(x.dtype), extras, layout=self.layout, gated=gated, path=path)

    def _spread(self, x: Float[Array, "rows k"], bias: Any, gated: bool) -> Float[Array, "rows *out"]:
        """Multiply by each device's shard of the weight; partial products of sharded inputs are summed."""
        *outs, along = spread_over(self.axes, self.shape)
        assert not (along and (gated or bias is not None))  # the gate and the bias apply only after the sum

        def own(x: jax.Array, weight: Unquantized, bias: Any) -> jax.Array:
            part = self._product(x, weight.weight, bias, gated)
            return lax.psum(part, along) if along else part

        specs = (PartitionSpec(None, along), self.partition(), PartitionSpec(*outs))
        run = jax.shard_map(own, in_specs=specs, out_specs=PartitionSpec(None, *outs[gated:]), check_vma=False)
        result: jax.Array = run(x, self, bias)
        return result


def gemm_refusal(dtype: Any, platform: str) -> str | None:
    """Return why the kernel cannot compute products of this dtype on a platform, in one sentence; None if it can."""
    if platform == "cpu":
        return "its kernel is for GPUs, and this is a CPU"
    here, row = lowering_target(), jax.ShapeDtypeStruct((1, 64), dtype)
    target = here if here.platform in ("gpu", "cuda") else Target("gpu", HOPPER)  # compile for a remote GPU
    chosen = dense_matmul.explain(row, jax.ShapeDtypeStruct((64, 64), dtype), measured=False, target=target)
    return None if chosen.path == "mosaic" else chosen.why


def for_gemm(specs: Any, params: Any, path: Wish) -> tuple[Any, Any]:
    """Wrap matrices of the model's dtype as `Unquantized` in trees of specs and parameters, keeping their layout."""

    def wrapped(spec: ParamSpec, value: Any) -> Any:
        if spec.inputs is None or len(spec.shape) < 2 or spec.dtype is not None or "expert" in spec.axes:
            return value
        first = spec.inputs == 0
        axes = (*spec.axes[1:], spec.axes[0]) if first else spec.axes
        return Unquantized(value, "in first" if first else "in last", axes, path)

    return jax.tree.map(wrapped, specs, specs), jax.tree.map(wrapped, specs, params)


def laid_out(specs: Any, params: Any, layout: Layout) -> tuple[Any, Any]:
    """Return trees of specs and of parameters with all matrices in one layout: "in last" as ``[*out, in]``, like those
    of checkpoints and quantised ones, or "in first" as ``[in, *out]``, except tables and experts. Replaced arrays are
    deleted one by one, so the memory never holds both trees."""
    made: dict[int, Any] = {}  # an array shared by several paths stays shared
    old = 0 if layout == "in last" else -1

    def turned(spec: ParamSpec, value: Any) -> Any:
        if spec.inputs != old or len(spec.shape) < 2 or (layout == "in first" and {"vocab", "expert"} & {*spec.axes}):
            return value
        if id(value) not in made:
            axes = spec.axes if old else (*spec.axes[1:], spec.axes[0])
            made[id(value)] = value, Unquantized(_moved(value, old), layout, axes, "xla")
        return made[id(value)][1]

    return jax.tree.map(turned, specs, specs), jax.tree.map(turned, specs, params)


def _moved(array: Any, axis: int) -> Any:
    """Move the first axis (0) or the last (-1) of an array, a `ParamSpec` or a `ShapeDtypeStruct` to the other end."""

    def order(of: tuple[Any, ...]) -> tuple[Any, ...]:
        return (of[-1], *of[:-1]) if axis else (*of[1:], of[0])

    if isinstance(array, ParamSpec):
        shape, axes = order(array.shape), order(array.axes)
        return dataclasses.replace(array, shape=shape, axes=axes, sources=(), inputs=-1 - axis)
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(order(array.shape), array.dtype)
    moved = jax.block_until_ready(jnp.moveaxis(array, axis, -1 - axis))
    array.delete()
    return moved


def layout_for_cpu(rows: int, itemsize: int, cpuinfo: pathlib.Path = _CPUINFO) -> Layout | None:
    """Return the best layout on a CPU for matrices of ``itemsize`` bytes per number in decode steps of ``rows`` rows;
    None: the layout of the family. Measurements are in docs/benchmarks.md.

    One row of 16-bit numbers: [in, out], which `pallas_kernels.one_row` reads fastest. With matrix registers (Intel
    AMX) [out, in]: matrix products of a 125M model's decode step take a sixth less time in bfloat16, up to an eighth in
    float32; without AMX (an AMD EPYC) steps of 8 and more rows are slower in this layout.
    """
    if rows == 1 and itemsize == 2:
        return "in first"
    return "in last" if _has_amx(cpuinfo) else None


@functools.cache
def _has_amx(cpuinfo: pathlib.Path) -> bool:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return False
    return any("amx_bf16" in line.split() for line in lines if line.startswith("flags"))
