"""API of few_rows: a C kernel on CPUs that have a compiler; `refusal` says where products stay XLA's.

XLA passes products to a library that packs the whole weight at every call, a single row of 16 bits not even to that,
and a row's bits depend on the number of rows. The kernel reads weights in place, at the memory's rate for up to four
rows (docs/benchmarks.md), and each row has the same bits alone and with others: programs of up to 64 rows may be
substituted for each other.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.choice import lowering_target
from pallas_kernels.few_rows import native

MOST_ROWS = 64
_MOST_ROWS_WITH_AMX = 8  # of bfloat16: XLA's library computes more by matrix registers
_MULTIPLE = 16  # of inputs: the most LANES of few_rows.c


def refusal(x: Any, weights: Any, along: int) -> str | None:
    """Return why the kernel does not compute a product of these shapes and dtypes here; None if it does."""
    inputs, rows = x.shape[-1], math.prod(x.shape[:-1])
    if lowering_target().platform != "cpu" or jax.sharding.get_abstract_mesh().size > 1:
        return "it runs on a CPU, on one device"
    if x.dtype != weights.dtype or x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"{weights.dtype} weights times {x.dtype}: both must be float32, bfloat16 or float16"
    if along != weights.ndim - 1 or along == 0:
        return "the weight's inputs must be its last dimension"
    if inputs % _MULTIPLE or not x.size or not weights.size:
        return f"{inputs} inputs: a multiple of {_MULTIPLE}"
    if rows > (most := most_rows(x.dtype)):
        return f"{rows} rows: at most {most}"
    if x.dtype == jnp.float16 and not native.supports_float16():
        return "float16 needs a compiler that has it"
    return native.unavailable()


def most_rows(dtype: Any) -> int:
    """Return the most rows of a product that the kernel computes at least as fast as XLA's library."""
    return _MOST_ROWS_WITH_AMX if jnp.dtype(dtype) == jnp.bfloat16 and native.has_amx() else MOST_ROWS


def dot(x: Float[Array, "*rows k"], weights: Float[Array, "*n k"], dtype: Any = None) -> Float[Array, "..."]:
    """Contract the last dimensions of both, in float32: each row is bitwise independent of the others.

    Args:
        dtype: dtype of the result, that of ``x`` or float32; None: the dtype of ``x``.
    """
    inputs, result = x.shape[-1], jnp.dtype(dtype or x.dtype)
    product = _product(x.reshape(-1, inputs), weights.reshape(-1, inputs), result)
    return product.reshape(*x.shape[:-1], *weights.shape[:-1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _product(x: jax.Array, weights: jax.Array, dtype: Any) -> jax.Array:
    shape = jax.ShapeDtypeStruct((x.shape[0], weights.shape[0]), dtype)
    call = jax.ffi.ffi_call(native.TARGET, shape, vmap_method="sequential")
    result: jax.Array = call(x.astype(jnp.float32), weights)
    return result


@_product.defjvp
def _(dtype: Any, operands: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """Tangents are XLA's products, which can be transposed."""
    (x, weights), (of_x, of_weights) = operands, tangents

    def by_xla(x: jax.Array, weights: jax.Array) -> jax.Array:
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
        contracted: Any = (((1,), (1,)), ((), ()))
        return lax.dot_general(x, weights, contracted, precision=precision, preferred_element_type=dtype)

    return _product(x, weights, dtype), by_xla(of_x, weights) + by_xla(x, of_weights)
