"""Parallelism settings. No jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism: how the model is sharded over devices.

    Attributes:
        tensor_parallel_size: devices over which heads, feed-forward layers, vocabulary and KV pool are sharded;
            "auto" (0): as many of those present as can be.
        expert_parallel_size: number of groups of tensor_parallel_size devices over which MoE experts are distributed;
            all other weights are sharded over the devices of all groups.
        pipeline_parallel_size: pipeline stages of that many devices; each computes some of the layers.
        data_parallel_size: replicas of all of that: each has the whole model, its own KV pool and some of the requests.
        enable_dp_attention: data-parallel attention: each expert-parallel group is one device, with unsharded attention
            and non-expert weights and its own sequences, slots and KV pool; tokens are sent to their experts and back.
        sequence_parallel_norms: in prefill programs each device has the hidden states of some tokens between the
            sublayers: each all-reduce becomes a reduce-scatter, and an all-gather after the norm.
    """

    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_dp_attention: bool = False
    sequence_parallel_norms: bool = False

    @property
    def dp_ranks(self) -> int:
        """Number of data-parallel attention ranks, each with its own sequences."""
        return self.expert_parallel_size if self.enable_dp_attention else 1

    @property
    def devices(self) -> int:
        """Number of devices over which heads and the KV pool are sharded."""
        return self.tensor_parallel_size * (1 if self.enable_dp_attention else self.expert_parallel_size)
