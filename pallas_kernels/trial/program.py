"""A launch as a program with a seed as its only argument: it makes operands, runs kernel and XLA path, and compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import DisabledSafetyCheck, export
from jaxtyping import Array, Float32

from pallas_kernels import bits
from pallas_kernels.launches import Launch
from pallas_kernels.trial.cases import case_of

# Relative to a vector's norm (the last dimension), and to the mean norm of all vectors. Two 16-bit results with
# different roundings, and the kernel's intermediate roundings (probabilities, 8-bit numbers of a pool), stay a third
# below it; a wrong key, page or expert does not.
TOLERANCE, FLOOR = 3e-2, 1e-2
_KERNELS = tuple(map(DisabledSafetyCheck.custom_call, ("mosaic_gpu", "mosaic_gpu_v2")))


def checking(launch: Launch) -> Callable[[Any], Float32[Array, ""]]:
    """Make the program: it returns a vector's largest error over the tolerance; infinity if a result is not finite."""

    def check(seed: Any) -> Float32[Array, ""]:
        case = case_of(launch, seed)
        plain = case.operands if case.plain is None else case.plain
        operands, plain = jax.lax.optimization_barrier((case.operands, plain))
        got = case.select(launch.kernel(*operands, **case.options))
        want = launch.plain(*plain, **case.options)
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        return jnp.stack([_error(one, other) for one, other in pairs]).max()

    return check


def _error(one: Any, other: Any) -> Float32[Array, ""]:
    one, other = (bits.numbers(each).astype(jnp.float32) for each in (one, other))
    norms = jnp.linalg.norm(other, axis=-1)
    excess = jnp.linalg.norm(one - other, axis=-1) / (TOLERANCE * norms + FLOOR * norms.mean() + 1e-20)
    return jnp.where(jnp.isfinite(excess), excess, jnp.inf).max()


def exported(launch: Launch, platform: str) -> bytes:
    """Export the program as StableHLO, for another process of this machine.

    Args:
        platform: JAX's name of it: "cuda" or "cpu".

    Raises:
        ValueError, NotImplementedError: Mosaic GPU does not support the kernel.
    """
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    return bytes(export(jax.jit(checking(launch)), platforms=[platform], disabled_checks=_KERNELS)(seed).serialize())
