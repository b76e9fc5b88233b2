"""Log line of an engine that is ready: devices, weights, KV cache capacity, attention backend."""

from __future__ import annotations

import math

import jax

from jaxinfer.config import ResolvedEngine
from jaxinfer.kv.pool import no_kernel
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import array_bytes
from jaxinfer.types import CacheSpec
from pallas_kernels.choice import lowering_target


def summary(model: Model, config: ResolvedEngine) -> str:
    """Describe the resolved settings of an engine in one line."""
    spec = model.cache_spec.stored_as(config.kv_cache_dtype)
    folder = jax.config.jax_compilation_cache_dir
    return ", ".join(
        [
            f"engine: {_devices(config)}",
            f"weights {_size(sum(array_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(model.params)))}",
            _pool(config, spec.bytes_per_page(config.page_size, model.dtype.itemsize, 1)),
            *_states(config, spec.bytes_per_state(model.dtype.itemsize)),
            f"attention by {_backend(model, config, spec)}",
            "compiled programs are not kept" if folder is None else f"compiled programs are kept in {folder}",
        ]
    )


def _devices(config: ResolvedEngine) -> str:
    kind = jax.devices()[0].device_kind
    each = config.tensor_parallel_size * config.expert_parallel_size * config.pipeline_parallel_size
    return f"{each * config.data_parallel_size} x {kind}"


def _pool(config: ResolvedEngine, page_bytes: int) -> str:
    """Describe the KV cache capacity: the sum of the pools of all replicas and ranks."""
    pools = config.data_parallel_size * config.dp_ranks
    tokens = pools * config.num_pages * config.page_size
    longest = pools * (config.num_pages // math.ceil(config.max_model_len / config.page_size))
    return (
        f"KV cache {_size(pools * config.num_pages * page_bytes)} for {tokens} tokens: "
        f"room for {longest} sequences of {config.max_model_len} ({config.max_num_seqs} run at once)"
    )


def _states(config: ResolvedEngine, state_bytes: int) -> list[str]:
    """Describe the capacity for states, if the model has any."""
    count = config.data_parallel_size * config.num_states
    return [f"{count} states {_size(count * state_bytes)}"] if count else []


def _backend(model: Model, config: ResolvedEngine, spec: CacheSpec) -> str:
    """Return the attention backend; "auto" is resolved by the device and the shapes."""
    if config.attention_backend != "auto":
        return config.attention_backend
    return (
        "xla" if no_kernel(spec.on_each(config.devices), config.page_size, model.dtype, lowering_target()) else "mosaic"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 20 else f"{count / 2**20:.1f} MiB"
