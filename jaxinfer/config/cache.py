"""Settings of memory: the KV cache, and weights in host memory. No jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Memory: pages of the KV cache and weights, on the devices and in host memory.

    Attributes:
        page_size: tokens per KV page, a power of two.
        num_pages: pages in the KV pool (default: on a GPU what ``memory_utilization`` leaves, on a CPU enough for
            max_num_seqs sequences of max_model_len; both bounded by ``kv_cache_bytes``).
        num_states: for models with recurrent layers: fixed-size states kept in the pool, for running sequences and for
            cached prefixes (default: four for each of max_num_seqs). With speculation each row of a step has one more.
        kv_cache_dtype: dtype of keys and values in the pool. "auto": the model's dtype; "int8" or "fp8" (e4m3):
            quantised to 8 bits, with a scale per head and token, for nearly twice the tokens in the same memory.
        kv_cache_bytes: upper bound on the pool size per device where num_pages is not set (default: none on a GPU, 4
            GiB on a CPU).
        memory_utilization: fraction of device memory (on a CPU: of available memory) for weights, pool and running
            programs together.
        enable_prefix_caching: keep the pages of finished prompts for later prompts with the same prefix.
        swap_space_gib: host memory for pages of preempted sequences and for evicted prefix pages.
        weight_offload_gib: at least so much of each device's weights stays in page-locked host memory: whole layers,
            evenly spaced, of mixtures the experts first. Each program copies them to the device, a layer ahead of its
            use (docs/settings.md). More than the layers have: all of them.
    """

    page_size: int = 64
    num_pages: int | None = None
    num_states: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_bytes: int | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    swap_space_gib: float = 4.0
    weight_offload_gib: float = 0.0
