"""API of token_quant: a Mosaic kernel on Ampere (int8), Ada and Hopper GPUs, XLA everywhere else."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from pallas_kernels.choice import ADA, AMPERE, HOPPER, Choice, Target, Wish, choose
from pallas_kernels.launches import note
from pallas_kernels.token_quant import mosaic, xla
from pallas_kernels.token_quant.reference import Rule

_OP = "token_quant"


def explain(x: Any, rule: Rule, *, path: Wish = "auto", target: Target | None = None) -> Choice:
    """Return the path of `quantize` for tokens of this shape and dtype, and why. Their number does not matter.

    Args:
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: the Mosaic kernel is forced and does not support these tokens.
    """
    least = AMPERE if rule.dtype == "int8" else ADA
    return choose(_OP, path, mosaic.refusal(x, rule), least=least, most=HOPPER, target=target)


def quantize(
    x: Float[Array, "rows k"], rule: Rule, *, path: Wish = "auto", multiple: int = 1
) -> tuple[Num[Array, "rows k"], Float[Array, " scales"]]:
    """Return codes and scales of tokens, see `reference`: one launch, each token bitwise independent of the others.

    The kernel's division may be off by one ulp, in the same way in every program. A batch of calls (`jax.vmap`) takes
    the XLA path.

    Args:
        multiple: divides the number of scales; those beyond the rows are undefined. A product that loads scales of
            whole tiles then needs no launch to pad them.

    Raises:
        ValueError: the Mosaic kernel is forced and does not support these tokens.
    """
    if explain(x, rule, path=path).path == "xla":
        return _by_xla(rule, multiple, x)
    note(_OP, mosaic.quantize, xla.quantize, x, rule=rule)
    codes, scales = _kernel(rule, multiple)(x)
    return codes, scales


def _by_xla(rule: Rule, multiple: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    codes, scales = xla.quantize(x, rule)
    return codes, jnp.pad(scales, (0, -scales.shape[0] % multiple))


@functools.cache
def _kernel(rule: Rule, multiple: int) -> Any:
    @jax.custom_batching.custom_vmap
    def launch(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mosaic.quantize(x, rule, multiple=multiple)

    @launch.def_vmap
    def _(_: int, batched: Any, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[bool, bool]]:
        return jax.vmap(functools.partial(_by_xla, rule, multiple))(x), (True, True)

    return launch
