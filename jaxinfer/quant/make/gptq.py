"""GPTQ (Frantar et al. 2022): rounds one input at a time and compensates the error in the later inputs.

For a weight row w and inputs x with G = sum x x^T it lowers (w - q) G (w - q)^T. With U the upper Cholesky factor of
the inverse of G + damping (G^-1 = U^T U), rounding input j with error e_j = (w_j - q_j) / U_jj changes each later w_k
by -e_j U_jk.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.quant.make.grid import IntegerGrid, Made

_BLOCK = 128  # inputs whose errors are propagated together
_TRIES = 5


def gptq(
    weight: Float[Array, "out k"],
    gram: Float[Array, "k k"],
    grid: IntegerGrid,
    damp: float = 0.01,
    act_order: bool = False,
    static_groups: bool = False,
) -> Made:
    """Quantise a weight whose inputs have the Gram matrix ``gram``: its factor in float64, the rest in float32.

    Inputs that are always zero are rounded to nearest.

    Args:
        gram: sum or mean of x x^T.
        damp: fraction of the mean diagonal to add to it; multiplied by ten while the factorisation fails.
        act_order: process inputs by descending diagonal; neighbours in that order share a scale, so the result has an
            ``order``.
        static_groups: scales come from the original weight, and groups stay those of neighbouring inputs.

    Raises:
        ValueError: groups do not divide the inputs, or the matrix is not that of finite inputs.
    """
    order = jnp.argsort(-jnp.diagonal(gram)) if act_order else jnp.arange(weight.shape[1])
    ordered = _ordered(gram, order)
    root = _finite_root(ordered, damp)
    width = grid.width(weight.shape[1])
    if static_groups:
        codes, scales, zeros = _solve(weight, root, order, grid, _block(weight.shape[1], width), True)
        return grid.made(codes, scales, zeros)
    codes, scales, zeros = _solve(weight, root, order, grid, _block(weight.shape[1], width), False)
    return grid.made(codes, scales, zeros, order if act_order else None)


def reconstruction_error(
    weight: Float[Array, "out k"], approximation: Float[Array, "out k"], gram: Float[Array, "k k"]
) -> Float[Array, ""]:
    """Return the squared error of the layer's outputs relative to their squared norm: 0 is exact, 1 as bad as zeros."""
    return _energy(weight - approximation, gram) / jnp.maximum(_energy(weight, gram), 1e-30)


def _energy(weight: Array, gram: Array) -> Array:
    weight = weight.astype(jnp.float32)
    return (jnp.matmul(weight, gram, precision=lax.Precision.HIGHEST) * weight).sum()


def _block(inputs: int, group: int) -> int:
    """Return a block size such that scales come from up-to-date values: whole groups per block, or blocks per group."""
    fits = inputs % _BLOCK == 0 and (group % _BLOCK == 0 or _BLOCK % group == 0)
    return _BLOCK if fits else group


@jax.jit
def _ordered(gram: Array, order: Array) -> Array:
    diagonal = jnp.diagonal(gram)
    return (gram + jnp.diag((diagonal == 0).astype(gram.dtype)))[order][:, order]


def _finite_root(gram: Array, damp: float) -> Array:
    for attempt in range(_TRIES):
        root = _inverse_root(gram, damp * 10.0**attempt)
        if bool(jnp.isfinite(root).all()):
            return root
    raise ValueError("the Gram matrix of a weight's inputs cannot be factorised: are all inputs finite?")


def _inverse_root(gram: Array, damp: float) -> Array:
    """Return the upper U with U^T U = (gram + damping)^-1, computed in float64 and returned in float32.

    Uses the factor of the reversed matrix: gram = R R^T with R upper, U = R^-1, so only a triangular matrix is
    inverted. In float32 the small eigenvalues would be lost to rounding, and with them codes of weights near the middle
    of two.
    """
    with jax.enable_x64(True):
        return _double_root(gram, damp)


@jax.jit
def _double_root(gram: Array, damp: Array | float) -> Array:
    size = gram.shape[0]
    wide = gram.astype(jnp.float64)
    damped = wide + damp * jnp.mean(jnp.diagonal(wide)) * jnp.eye(size, dtype=wide.dtype)
    upper = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    inverse = lax.linalg.triangular_solve(upper, jnp.eye(size, dtype=wide.dtype), left_side=True, lower=False)
    return inverse.astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("grid", "block", "static"))
def _solve(
    weight: Array, root: Array, order: Array, grid: IntegerGrid, block: int, static: bool
) -> tuple[Array, Array, Array]:
    """Return codes, scales and zeros; codes and groups in processing order, or with ``static`` in input order."""
    weight = weight.astype(jnp.float32)
    out, inputs = weight.shape
    group = grid.width(inputs)
    scales, zeros = grid.fit(weight.reshape(out, -1, group))
    step = functools.partial(_one_block, root=root, order=order, grid=grid, block=block, group=group, static=static)
    start = (weight[:, order], jnp.zeros_like(weight), scales, zeros)
    _, codes, scales, zeros = lax.fori_loop(0, inputs // block, step, start)
    return (jnp.zeros_like(codes).at[:, order].set(codes) if static else codes), scales, zeros


_State = tuple[Array, Array, Array, Array]  # weight with all corrections, codes, scales, zeros


def _one_block(
    index: Array,
    state: _State,
    *,
    root: Array,
    order: Array,
    grid: IntegerGrid,
    block: int,
    group: int,
    static: bool,
) -> _State:
    weight, codes, scales, zeros = state
    first = index * block
    rows = lax.dynamic_slice_in_dim(root, first, block)
    corner = lax.dynamic_slice_in_dim(rows, first, block, axis=1)
    own = lax.dynamic_slice_in_dim(weight, first, block, axis=1)

    def one_input(j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        own, own_codes, errors, scales, zeros = carry
        at = (order[first + j] if static else first + j) // group
        if not static:
            scales, zeros = _refit(own, weight, first, j, at, scales, zeros, grid, group)
        column, scale, zero = own[:, j], scales[:, at], zeros[:, at]
        code = grid.code(column, scale, zero)
        error = (column - (code - zero) * scale) / corner[j, j]
        own = own - error[:, None] * corner[j]  # upper triangular: inputs before j stay unchanged
        return own, own_codes.at[:, j].set(code), errors.at[:, j].set(error), scales, zeros

    empty = jnp.zeros((weight.shape[0], block), jnp.float32)
    _, own_codes, errors, scales, zeros = lax.fori_loop(0, block, one_input, (own, empty, empty, scales, zeros))
    weight = weight - jnp.matmul(errors, rows, precision=lax.Precision.HIGHEST)
    return weight, lax.dynamic_update_slice_in_dim(codes, own_codes, first, axis=1), scales, zeros


def _refit(
    own: Array,
    weight: Array,
    first: Array,
    j: Array,
    at: Array,
    scales: Array,
    zeros: Array,
    grid: IntegerGrid,
    group: int,
) -> tuple[Array, Array]:
    """Fit the scale of a group from its corrected weights when its first input is processed."""

    def fitted() -> tuple[Array, Array]:
        within = group <= own.shape[1]
        values = lax.dynamic_slice_in_dim(own if within else weight, j if within else first, group, axis=1)
        scale, zero = grid.fit(values)
        return scales.at[:, at].set(scale), zeros.at[:, at].set(zero)

    return lax.cond((first + j) % group == 0, fitted, lambda: (scales, zeros))


def enough_tokens(count: float, inputs: int) -> bool:
    """Return whether a Gram matrix of ``count`` vectors is meaningful: an eighth of the number of inputs suffices."""
    return count >= math.ceil(inputs / 8)
