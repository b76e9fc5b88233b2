"""Entry points of the Mosaic kernel: arrange the operands in the kernel's format (the device code is in `kernel`)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.quant_matmul import fit
from pallas_kernels.quant_matmul.fit import Operands, heuristic_tiles, refusal
from pallas_kernels.quant_matmul.mosaic.kernel import launcher
from pallas_kernels.quant_matmul.types import Tiles

__all__ = ["Tiles", "heuristic_tiles", "matmul", "matmul_tiles", "refusal"]


def matmul(
    x: Float[Array, "rows k"],
    weights: Num[Array, "n k"],
    scales: Num[Array, "*groups n"],
    zeros: Int[Array, "groups n"] | None = None,
    *,
    e2m1: bool = False,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "rows n"]:
    """See `reference.matmul`; the result has the dtype of ``x``. Products are exact, sums in float32.

    Args:
        tiles: block sizes; None: those tuned for the device (`pallas_kernels.tiles`), else `heuristic_tiles`.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    (rows, inputs), channels = x.shape, weights.shape[0]
    count, size = fit.tiled(rows)
    padded = jnp.pad(x, ((0, count * size - rows), (0, 0))) if count * size > rows else x
    flat = (scales.shape[0] if scales.ndim == 2 else 1, 1, channels)
    given = Operands(
        padded.reshape(count, size, inputs),
        weights.reshape(1, channels, inputs),
        scales.reshape(flat),
        None if zeros is None else zeros.astype(jnp.int8).reshape(flat),
        e2m1,
    )
    return _launched(given, {}, tiles, interpret).reshape(-1, channels)[:rows]


def matmul_tiles(
    x: Float[Array, "tiles rows k"],
    weights: Num[Array, "experts n k"],
    scales: Num[Array, "groups experts n"],
    zeros: Int[Array, "groups experts n"] | None,
    groups: Groups,
    *,
    e2m1: bool = False,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "tiles rows n"]:
    """Multiply each tile's rows by the transposed weights of the tile's expert; empty tiles give zeros.

    Raises:
        ValueError: the operands are rejected, see `refusal`, or every expert has its own tile.
    """
    if groups.experts is None:
        raise ValueError("every expert has a tile of its own: the kernel is for tiles that have an expert each")
    given = Operands(x, weights, scales, None if zeros is None else zeros.astype(jnp.int8), e2m1, grouped=True)
    owners = {
        "experts": groups.experts.astype(jnp.int32),
        "occupied": groups.occupied.reshape(1).astype(jnp.int32),
    }
    return _launched(given, owners, tiles, interpret)


def _launched(
    given: Operands, owners: dict[str, jax.Array], tiles: Tiles | None, interpret: plgpu.InterpretGPUParams | None
) -> Float[Array, "tiles rows n"]:
    if (why := refusal(given, tiles=tiles)) is not None:
        raise ValueError(why)
    shape = fit.shape_of(given, tiles or fit.best_tiles(given))._replace(interpret=interpret is not None)
    stored = {"x": given.x, "weights": given.weights, "scales": given.scales}
    arrays = {**stored, **({} if given.zeros is None else {"zeros": given.zeros}), **owners}
    result: jax.Array = launcher(shape, tuple(arrays), interpret)(*arrays.values())[0]
    return functools.reduce(jnp.add, list(result)).astype(shape.dtype) if shape.written > 1 else result
