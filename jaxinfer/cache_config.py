"""Settings of the KV cache. No jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache: its pages on the devices and on the host.

    Attributes:
        page_size: tokens per KV page, a power of two.
        num_pages: size of the KV pool (default: on a GPU what ``memory_utilization`` leaves, on a CPU room for
            max_num_seqs sequences of max_model_len; both as far as ``kv_cache_bytes`` allows).
        num_states: of models whose layers have states of fixed size: how many are kept, of sequences that run and of
            prefixes that are cached (default: four for each of max_num_seqs). With speculation each row of a step has
            room for one more.
        kv_cache_dtype: of keys and values in the pool: "auto": the model's; "int8" or "fp8" (e4m3): rounded to 8 bits,
            with a scale for each head of each token, for nearly twice the tokens in the same memory.
        kv_cache_bytes: bound on the size of the pool where num_pages does not say it, on each device (default: none on
            a GPU, 4 GiB on a CPU).
        memory_utilization: share of the device's memory (on a CPU: of what is available) that weights, pool and running
            programs may take together.
        enable_prefix_caching: keep the pages of finished prompts for later ones that begin alike.
        swap_space_gib: host memory for pages of preempted sequences and for evicted prefix pages.
    """

    page_size: int = 64
    num_pages: int | None = None
    num_states: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_bytes: int | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    swap_space_gib: float = 4.0
