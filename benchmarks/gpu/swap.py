"""Swap of 8B-shaped pages to host memory and back, with the engine's own programs: a subsection of section step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.execution.step import make_move_programs
from jaxinfer.gpu_check.measure import fill, time_calls
from jaxinfer.gpu_check.report import Report
from jaxinfer.kv.pool import LayerPool, new_pools
from jaxinfer.kv.transfer import TRANSFERS, moved_pages
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh, replicated
from jaxinfer.parallel.processes import on_host
from jaxinfer.types import CacheSpec

_CALLS = 16  # in one direction: a sequence of 4,096 tokens, in the largest calls


def measure(report: Report, model: Model, page: int) -> None:
    """Measure the milliseconds per page, for each number of pages that a call moves."""
    spec, pools = model.cache_spec, _pools(model.cache_spec, page)
    of_page = moved_pages(spec, 1, page, jnp.dtype(jnp.bfloat16))
    size = of_page.size * of_page.dtype.itemsize
    for count in TRANSFERS:
        left, came, pools = _in_calls(spec, pools, count)
        rates = {f"{name}_gb_s": round(size / ms / 1e6, 1) for name, ms in (("out", left), ("in", came))}
        report.put(f"swap, {count} pages a call", page_out_ms=left, page_in_ms=came, page_bytes=size, **rates)


def _in_calls(spec: CacheSpec, pools: Any, count: int) -> tuple[float, float, Any]:
    """Return the milliseconds per page of swap-out and swap-in with ``count`` pages a call, and the resulting pools."""
    (_, exporting, restoring), ids = make_move_programs(spec), np.arange(count, dtype=np.int32)[None]
    export = jax.jit(exporting, out_shardings=on_host(replicated(make_mesh()))).lower(pools, ids).compile()
    pages = export(pools, ids)
    restore = jax.jit(restoring, donate_argnums=0).lower(pools, pages, ids).compile()

    def leave(pools: Any) -> tuple[Any, Any]:
        return export(pools, ids), pools

    def come(pools: Any) -> tuple[Any, Any]:
        restored = restore(pools, pages, ids)
        return restored, restored

    left, pools = _time(leave, pools, count)
    came, pools = _time(come, pools, count)
    return left, came, pools


def _pools(spec: CacheSpec, page: int) -> list[LayerPool]:
    pools = new_pools(spec, 1, page, jnp.dtype(jnp.bfloat16))
    shape = spec.pool_shape(_CALLS * max(TRANSFERS), page)
    filled = [pool._replace(data=fill(seed, shape, jnp.bfloat16)) for seed, pool in enumerate(pools)]
    return list(jax.device_put(filled, replicated(make_mesh())))


def _time(call: Callable[[Any], tuple[Any, Any]], pools: Any, count: int) -> tuple[float, Any]:
    """Return the milliseconds per page in calls that move ``count`` pages each, and the resulting pools."""
    current = [pools]

    def once() -> Any:
        for _ in range(_CALLS):
            result, current[0] = call(current[0])
        return result

    return time_calls(once, inside=_CALLS * count, rounds=5)["best_ms"], current[0]
