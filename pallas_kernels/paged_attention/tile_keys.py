"""Keys of the paged attention kernels' tiles, from shapes and dtypes alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.tiles import Key, Option

DECODE, PREFILL = "paged_attention.decode", "paged_attention.prefill"


def decode_key(q: Any, pool: Any, tables: Any, options: AttentionOptions) -> Key:
    """Return the key for ``q [sequences, chunk, heads, head_dim]``. Group and chunk are sizes: they share bits."""
    sequences, chunk, heads, _ = q.shape
    sizes = {"rows": sequences, "queries": chunk * (heads // pool.shape[2]), "kv_heads": pool.shape[2]}
    return Key(_options(q, pool, options), {**sizes, "keys": _keys(pool, tables, options)})


def prefill_key(q: Any, pool: Any, tables: Any, options: AttentionOptions) -> Key:
    """Return the key for ``q [sequences, chunk, heads, head_dim]``."""
    sequences, chunk, heads, _ = q.shape
    sizes = {"sequences": sequences, "chunk": chunk, "group": heads // pool.shape[2], "kv_heads": pool.shape[2]}
    told_apart: dict[str, Option] = {**_options(q, pool, options), "tree": int(options.tree is not None)}
    return Key(told_apart, {**sizes, "keys": _keys(pool, tables, options)})


def _options(q: Any, pool: Any, options: AttentionOptions) -> dict[str, Option]:
    return {
        "head_dim": pool.shape[4],
        "page": pool.shape[3],
        "dtype": jnp.dtype(q.dtype).name,
        "pool": jnp.dtype(pool.dtype).name,
        "scales": None if options.scales is None else {3: "head", 4: "token"}[options.scales.ndim],
    }


def _keys(pool: Any, tables: Any, options: AttentionOptions) -> int:
    """Return the most keys that a query sees: a longer table costs nothing."""
    most = tables.shape[1] * pool.shape[3]
    return int(most if options.window is None else min(options.window, most))
