"""Keys of the tiles of MLA's decode kernel, from shapes and dtypes alone. Prefill has no tiles."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.tiles import Key

DECODE = "mla_attention.decode"


def decode_key(q: Any, pool: Any, tables: Any) -> Key:
    """Return the key for ``q [sequences, chunk, heads, latent]``. Heads are an option: split lengths depend on them."""
    sequences, chunk, heads, latent = q.shape
    page = pool.shape[1]
    options = {"page": page, "heads": heads, "latent": latent, "dtype": jnp.dtype(q.dtype).name}
    return Key(options, {"sequences": sequences, "chunk": chunk, "keys": tables.shape[1] * page})
