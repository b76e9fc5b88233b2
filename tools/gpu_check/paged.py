"""Section paged: the Mosaic GPU decode kernel against float64, and against the memory bandwidth."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat, paged_attention
from pallas_kernels.paged_attention.mosaic import decode as mosaic
from pallas_kernels.paged_attention.mosaic.decode import Tiles
from tools.gpu_check.measure import fill, relative_error, time_calls
from tools.gpu_check.reference import Case, float64_decode, poisoned_case
from tools.gpu_check.report import Report

LENGTHS = (2000, 0, 1, 64, 1025, 777)
QUICK_LENGTHS = (37, 0)
# page, head_dim, group, dtype
PARITY = (
    (64, 128, 4, jnp.bfloat16),
    (16, 128, 4, jnp.bfloat16),
    (64, 64, 8, jnp.bfloat16),
    (16, 64, 1, jnp.float16),
)


class Shape(NamedTuple):
    """A layer of Llama-3.1-8B (32 query heads on 8 KV heads of 128), ``rows`` sequences of ``context`` keys each."""

    rows: int
    context: int
    page: int
    tiles: Tiles

    def __str__(self) -> str:
        tiles = f"{self.tiles.stages} stages of {self.tiles.block_keys}, {self.tiles.keys_per_split} keys a split"
        return f"{self.rows} rows, {self.context} keys, page {self.page}, {tiles}, {self.tiles.blocks} blocks"


HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
# The most telling first: what the time does not suffice for is left out from the end.
TIMED = (
    Shape(64, 4096, 64, Tiles()),
    Shape(64, 2048, 64, Tiles()),
    Shape(64, 4096, 16, Tiles()),
    Shape(64, 2048, 16, Tiles()),
    Shape(64, 4096, 64, Tiles(keys_per_split=4096)),
    Shape(64, 2048, 64, Tiles(keys_per_split=2048)),
    Shape(64, 4096, 64, Tiles(keys_per_split=1024)),
    Shape(64, 4096, 64, Tiles(stages=2)),
    Shape(64, 4096, 64, Tiles(stages=6, blocks=132)),
    Shape(64, 4096, 64, Tiles(block_keys=128, stages=3, blocks=132)),
    Shape(1, 4096, 64, Tiles(keys_per_split=256)),
    Shape(8, 4096, 64, Tiles()),
    Shape(64, 512, 64, Tiles()),
)
_RESERVE_S = 8.0


def run(report: Report) -> None:
    on_gpu = jax.default_backend() == "gpu"
    interpret = None if on_gpu else compat.interpret_params()
    for page, head_dim, group, dtype in PARITY[-1:] if report.quick else PARITY:
        key = f"parity: page {page}, head_dim {head_dim}, group {group}, {jnp.dtype(dtype).name}"
        with report.attempt(key):
            lengths = QUICK_LENGTHS if report.quick else LENGTHS
            case = poisoned_case(lengths, page=page, dtype=dtype, group=group, head_dim=head_dim)
            report.put(key, **_parity(case, interpret), interpreted=not on_gpu)
    if not on_gpu:
        report.put("timed", skipped="no GPU: an interpreted kernel has no speed")
        return
    for shape in TIMED[-1:] if report.quick else TIMED:
        if report.left() < _RESERVE_S:
            report.put("stopped", reason=f"time: {shape} and what follows was not run")
            return
        with report.attempt(str(shape)):
            _time(report, shape)


def _parity(case: Case, interpret: Any) -> dict[str, Any]:
    scale = case.q.shape[-1] ** -0.5
    tiles = Tiles(stages=2, keys_per_split=64, blocks=3) if interpret else Tiles()
    run_kernel = functools.partial(_decode, scale=scale, tiles=tiles, interpret=interpret)
    out = run_kernel(case)
    exact = float64_decode(case, scale)
    alone = run_kernel(Case(case.q[:1], case.pool, case.tables[:1], case.lengths[:1]))
    return {
        "max_abs_error": float(f"{np.abs(np.asarray(out, np.float64) - exact).max():.3g}"),
        "relative_error": relative_error(np.asarray(out, np.float64), exact),
        "finite": bool(np.isfinite(out.astype(np.float32)).all()),
        "same_bits_twice": out.tobytes() == run_kernel(case).tobytes(),
        "same_bits_alone": out[:1].tobytes() == alone.tobytes(),
    }


def _decode(case: Case, *, scale: float, tiles: Tiles, interpret: Any) -> np.ndarray:
    def kernel(*operands: jax.Array) -> jax.Array:
        return mosaic.decode(*operands, scale=scale, tiles=tiles, interpret=interpret)

    operands = [jnp.asarray(array) for array in case]
    return np.asarray(compat.interpreted(lambda: kernel(*operands)) if interpret else jax.jit(kernel)(*operands))


def _time(report: Report, shape: Shape) -> None:
    operands = _operands(shape)
    moved = 2 * shape.rows * shape.context * KV_HEADS * HEAD_DIM * operands[1].dtype.itemsize
    scale = HEAD_DIM**-0.5
    kernel = functools.partial(mosaic.decode, scale=scale, tiles=shape.tiles)
    report.put(str(shape), **_timing(report, kernel, operands, moved))
    if shape.tiles == Tiles():
        xla = functools.partial(paged_attention.decode, scale=scale)
        report.put(f"XLA path: {shape}", **_timing(report, xla, operands, moved))


def _timing(report: Report, function: Callable[..., Any], operands: Any, moved: int) -> dict[str, Any]:
    jitted = jax.jit(function)
    timing = time_calls(lambda: jitted(*operands))
    return {**timing, **report.bandwidth(moved, timing["best_ms"])}


def _operands(shape: Shape) -> tuple[jax.Array, ...]:
    width = shape.context // shape.page
    pages = np.random.default_rng(0).permutation(shape.rows * width).astype(np.int32)
    return (
        fill(1, (shape.rows, HEADS, HEAD_DIM), jnp.bfloat16),
        fill(2, (shape.rows * width, 2, KV_HEADS, shape.page, HEAD_DIM), jnp.bfloat16),
        jnp.asarray(pages.reshape(shape.rows, width)),
        jnp.full((shape.rows,), shape.context, jnp.int32),
    )
