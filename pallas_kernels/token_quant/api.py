"""API of token_quant: a Mosaic kernel on Ampere (int8), Ada and Hopper GPUs, XLA everywhere else."""

from __future__ import annotations

import functools
from typing import Any

import jax
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
    x: Float[Array, "rows k"], rule: Rule, *, path: Wish = "auto"
) -> tuple[Num[Array, "rows k"], Float[Array, " rows"]]:
    """Return codes and scales of tokens, see `reference`: one launch, each token bitwise independent of the others.

    The kernel's division may be off by one ulp, in the same way in every program. A batch of calls (`jax.vmap`) takes
    the XLA path.

    Raises:
        ValueError: the Mosaic kernel is forced and does not support these tokens.
    """
    if explain(x, rule, path=path).path == "xla":
        return xla.quantize(x, rule)
    note(_OP, mosaic.quantize, xla.quantize, x, rule=rule)
    codes, scales = _kernel(rule)(x)
    return codes, scales


@functools.cache
def _kernel(rule: Rule) -> Any:
    @jax.custom_batching.custom_vmap
    def launch(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mosaic.quantize(x, rule)

    @launch.def_vmap
    def _(_: int, batched: Any, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[bool, bool]]:
        return jax.vmap(functools.partial(xla.quantize, rule=rule))(x), (True, True)

    return launch
