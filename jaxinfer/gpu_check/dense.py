"""matmul by either path, its operands and their float64 results."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.gpu_check.problem import BF16, FP8, FP16, INT8, MOSAIC, XLA, Operands, Problem, host
from pallas_kernels.matmul import Extras, Layout, reference
from pallas_kernels.matmul import xla as plain
from pallas_kernels.matmul.mosaic import launch
from pallas_kernels.matmul.mosaic.launch import Tiles

__all__ = ["Tiles", "mosaic", "problem", "xla"]


def mosaic(x: jax.Array, weights: jax.Array, **given: Any) -> jax.Array:
    """Multiply with the Mosaic kernel; ``given`` are operands of the epilogue by name, and options."""
    extras, options = _split(given)
    return launch.matmul(x, weights, extras, **options)


def xla(x: jax.Array, weights: jax.Array, **given: Any) -> jax.Array:
    """Multiply with XLA."""
    extras, options = _split(given)
    return plain.matmul(x, weights, extras, **options)


def _split(given: dict[str, Any]) -> tuple[Extras, dict[str, Any]]:
    named = {name: given.pop(name) for name in Extras._fields if name in given}
    return Extras(**named), given


def problem(rows: int, dtype: Any = BF16, **options: Any) -> Problem:
    """Return the parity problem at ``rows``; ``options`` are the options of `_build`."""
    module = "jaxinfer.gpu_check.dense"
    after = "".join(f", {name}" for name in ("gated", "added") if options.get(name))
    return Problem(
        "matmul",
        f"{rows} rows, {options.get('layout', 'in first')}, {jnp.dtype(dtype).name}{after}",
        {MOSAIC: f"{module}:mosaic", XLA: f"{module}:xla"},
        functools.partial(_build, rows=rows, dtype=dtype, **options),
        ("x", "x_scales", "residual"),
        1e-3,
        {"consumers": 1, "columns": 32, "depth": 128, "stages": 2, "blocks": 2},
    )


def _build(
    quick: bool, *, rows: int, dtype: Any, layout: Layout = "in first", gated: bool = False, added: bool = False
) -> Operands:
    """Build random operands. 8-bit numbers have scales; ``added`` adds a bias and a residual.

    The exact result keeps the roundings between the steps, because they are part of the op's definition.
    """
    inputs, columns, rows = (256, 96, min(rows, 70)) if quick else (4096, 1024 + 32, rows)
    rng, outputs = np.random.default_rng(0), (2, columns) if gated else (columns,)
    dims = (inputs, *outputs) if layout == "in first" else (*outputs, inputs)
    spread = 30.0 if dtype == INT8 else 1.0
    arrays: dict[str, Any] = {"x": rng.normal(size=(rows, inputs)), "weights": rng.normal(size=dims)}
    if dtype in (FP8, INT8):
        arrays["x_scales"] = (rng.uniform(0.5, 1.5, rows) / spread).astype(np.float32)
        arrays["scales"] = (rng.uniform(0.5, 1.5, outputs) / spread * inputs**-0.5).astype(np.float32)
    else:
        arrays["weights"] *= inputs**-0.5
    arrays |= {name: (arrays[name] * spread).astype(np.float32).astype(dtype) for name in ("x", "weights")}
    if added:
        arrays["bias"] = rng.normal(size=outputs).astype(dtype if dtype == FP16 else BF16)
        arrays["residual"] = rng.normal(size=(rows, columns)).astype(arrays["bias"].dtype)
    options: dict[str, Any] = {"layout": layout, "gated": gated}
    with jax.enable_x64(True):
        extras, product = _split({name: jnp.asarray(array) for name, array in arrays.items()})
        dtype = FP16 if dtype == FP16 else BF16
        exact = reference.matmul(product["x"], product["weights"], extras, **options, dtype=dtype, wide=jnp.float64)
        return Operands(arrays, options, (host(exact), None))
