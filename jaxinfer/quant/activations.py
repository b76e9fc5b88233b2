"""Products with 8-bit inputs as well as weights (W8A8), requested by `Grouped.activations`.

The largest magnitude of a token becomes `Grouped.int8_steps` in int8, or the largest finite value in E4M3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from jaxinfer.quant.layouts import Grouped
from pallas_kernels import matmul as dense_matmul
from pallas_kernels import quant_matmul, token_quant
from pallas_kernels.choice import Wish, lowering_target
from pallas_kernels.matmul import Extras
from pallas_kernels.sums import dot
from pallas_kernels.token_quant import Rule
from pallas_kernels.token_quant.reference import FLOAT8_MAX
from pallas_kernels.token_quant.xla import quotient

# The GEMM kernel loads scales of whole tiles of rows: of at most so many in a decode step.
_SCALES = 256


class Rounded(NamedTuple):
    """8-bit inputs: ``codes * scales``, with a scale for each ``group`` neighbours of a token, or one for all.

    There may be more scales than rows, see `token_quant.quantize`.
    """

    codes: Num[Array, "rows k"]
    scales: Float[Array, "scales groups"]
    group: int

    def plain(self) -> Float[Array, "rows k"]:
        """Dequantize to float32."""
        numbers = self.codes.astype(jnp.float32)
        if self.scales.shape[-1] == 1:
            return numbers * self.scales
        return numbers * jnp.repeat(self.scales, self.group, axis=-1)[:, : numbers.shape[-1]]


def rounded(
    x: Float[Array, "rows k"],
    layout: Grouped,
    static: Float[Array, ""] | None = None,
    along: Any = None,
    multiple: int = 1,
) -> Rounded:
    """Round inputs to 8 bits as a layout requires.

    Args:
        static: the scale of all inputs; None: dynamic scales for each token and ``layout.activation_group`` inputs, the
            last group of which may be smaller.
        along: the mesh axes over which inputs are sharded, when traced for one device's shard: a scale for all inputs
            of a token is then the maximum over all shards. Groups must not cross shards.
        multiple: see `token_quant.quantize`.
    """
    group, rule = layout.activation_group or x.shape[-1], _rule(layout)
    if static is None and along is None and group >= x.shape[-1]:
        codes, of_tokens = token_quant.quantize(x, rule, multiple=multiple)
        return Rounded(codes, of_tokens[:, None], group)
    grouped = _in_groups(x.astype(jnp.float32), group)
    if static is None:
        largest = jnp.abs(grouped).max(-1)
        if along is not None and not layout.activation_group:
            largest = lax.pmax(largest, along)
        scales = quotient(rule.divided(largest), jnp.full((), rule.most, jnp.float32))
    else:
        scales = jnp.full((1, 1), static, jnp.float32)
    numbers = quotient(grouped, scales[:, :, None]).reshape(x.shape[0], -1)[:, : x.shape[-1]]
    return Rounded(rule.codes(numbers), scales, group)


def _rule(layout: Grouped) -> Rule:
    most = layout.int8_steps if layout.activations == "int8" else FLOAT8_MAX
    return Rule(layout.activations, most, layout.activation_bound)


def product(
    x: Float[Array, "rows k"],
    layout: Grouped,
    arrays: Mapping[str, Any],
    along: Any = None,
    path: Wish = "xla",
    *,
    gated: bool = False,
) -> Float[Array, "rows n"]:
    """Return ``rounded(x) @ weight.T`` in the dtype of ``x``, from the parts of a `Grouped` weight.

    With one scale per token and channel, 8-bit codes are multiplied directly: integers into int32, floats into float32
    (except on a CPU, which lacks such a product); on a GPU a kernel also applies the scales if `by_gemm`. Outliers cost
    a second product in steps that have any.

    Args:
        along: see `rounded`.
        path: see `Quantized.path`.
        gated: return silu(gate) * up of outputs [2, n]; requires `by_gemm` for the whole weight.
    """
    codes = arrays["codes"].reshape(-1, arrays["codes"].shape[-1])
    scales = arrays["scales"].reshape(codes.shape[0], -1).astype(jnp.float32) * layout.factor
    zeros = arrays["zeros"].reshape(scales.shape) if layout.zeros else None

    def unrounded(x: Float[Array, "rows k"]) -> Float[Array, "rows n"]:
        return quant_matmul.matmul(x, codes, scales.T, None if zeros is None else zeros.T)

    if layout.outliers:
        large = jnp.abs(x) >= layout.outliers
        rest = product(jnp.where(large, 0, x), dataclasses.replace(layout, outliers=0.0), arrays, along, path)
        return rest + lax.cond(large.any(), unrounded, lambda x: jnp.zeros_like(rest), jnp.where(large, x, 0))
    by_kernel = by_gemm(x, layout, arrays, path, gated=gated)
    own = rounded(x, layout, arrays.get("input_scale"), along, _SCALES if by_kernel else 1)
    if by_kernel or gated:
        return _gemm(own, layout, arrays, x.dtype, gated, "mosaic" if by_kernel else "xla").reshape(x.shape[0], -1)
    if own.scales.shape[-1] == scales.shape[-1] == 1 and _multiplied_as_they_are(own.codes, codes):
        sums = _int_sums(own.codes, codes, zeros) if codes.dtype == jnp.int8 else dot(own.codes, codes, 1, jnp.float32)
        return (sums * own.scales * scales.T).astype(x.dtype)
    return unrounded(own.plain().astype(x.dtype))


def by_gemm(x: Any, layout: Grouped, arrays: Mapping[str, Any], path: Wish, *, gated: bool = False) -> bool:
    """Return whether the kernel of `pallas_kernels.matmul` computes the product of a weight that `rounds_tokens`."""
    if path == "xla" or (gated and layout.outliers):
        return False
    codes = arrays["codes"]
    row = jax.ShapeDtypeStruct((1, x.shape[-1]), codes.dtype)
    options: dict[str, Any] = {"gated": gated, "dtype": x.dtype, "measured": path == "auto"}
    return dense_matmul.explain(row, codes, layout="in last", **options).path == "mosaic"


def _gemm(
    x: Rounded, layout: Grouped, arrays: Mapping[str, Any], dtype: Any, gated: bool, path: Wish
) -> Float[Array, "rows *n"]:
    codes, rows = arrays["codes"], max(x.codes.shape[0], x.scales.shape[0])
    scales = arrays["scales"].reshape(codes.shape[:-1]).astype(jnp.float32) * layout.factor
    extras = Extras(x_scales=jnp.broadcast_to(x.scales[:, 0], (rows,)), scales=scales)
    return dense_matmul.matmul(x.codes, codes, extras, layout="in last", gated=gated, dtype=dtype, path=path)


def _in_groups(x: Float[Array, "rows k"], group: int) -> Float[Array, "rows groups group"]:
    """Split inputs into groups; the last group is zero-padded."""
    missing = -x.shape[-1] % group
    whole = jnp.pad(x, ((0, 0), (0, missing))) if missing else x
    return whole.reshape(x.shape[0], -1, group)


def _multiplied_as_they_are(x: Array, weight: Array) -> bool:
    if x.dtype != weight.dtype:
        return False
    return x.dtype == jnp.int8 or lowering_target().platform != "cpu"


def _int_sums(x: Int[Array, "rows k"], codes: Int[Array, "n k"], zeros: Int[Array, "n 1"] | None) -> Array:
    # at least two rows: with one, XLA:CPU converts the whole weight to int32 first
    both = jnp.concatenate([x, jnp.zeros_like(x)]) if x.shape[0] == 1 else x
    sums = dot(both, codes, 1, jnp.int32)[: x.shape[0]]
    if zeros is not None:
        sums = sums - x.astype(jnp.int32).sum(-1, keepdims=True) * zeros.astype(jnp.int32).T
    return sums.astype(jnp.float32)
