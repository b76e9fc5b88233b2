"""What the tiles of the paged attention kernels depend on, from shapes and dtypes alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.tiles import Key, Option

DECODE, PREFILL = "paged_attention.decode", "paged_attention.prefill"


def decode_key(q: Any, pool: Any, tables: Any, *, window: int | None = None, scales: Any = None) -> Key:
    """Of ``q [sequences, chunk, heads, head_dim]``. The group and the chunk are sizes: they share a model's bits."""
    sequences, chunk, heads, _ = q.shape
    sizes = {"rows": sequences, "queries": chunk * (heads // pool.shape[2]), "kv_heads": pool.shape[2]}
    return Key(_options(q, pool, scales), {**sizes, "keys": _keys(pool, tables, window)})


def prefill_key(
    q: Any, pool: Any, tables: Any, *, window: int | None = None, scales: Any = None, tree: Any = None
) -> Key:
    """Of ``q [sequences, chunk, heads, head_dim]``."""
    sequences, chunk, heads, _ = q.shape
    sizes = {"sequences": sequences, "chunk": chunk, "group": heads // pool.shape[2], "kv_heads": pool.shape[2]}
    options: dict[str, Option] = {**_options(q, pool, scales), "tree": int(tree is not None)}
    return Key(options, {**sizes, "keys": _keys(pool, tables, window)})


def _options(q: Any, pool: Any, scales: Any) -> dict[str, Option]:
    return {
        "head_dim": pool.shape[4],
        "page": pool.shape[3],
        "dtype": jnp.dtype(q.dtype).name,
        "pool": jnp.dtype(pool.dtype).name,
        "scales": None if scales is None else {3: "head", 4: "token"}[scales.ndim],
    }


def _keys(pool: Any, tables: Any, window: int | None) -> int:
    """That a query sees at most: a longer table costs nothing."""
    most = tables.shape[1] * pool.shape[3]
    return int(most if window is None else min(window, most))
