"""Settings of the devices. No jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Devices, and how the model is spread over them.

    Attributes:
        tensor_parallel_size: devices over which heads, feed-forward layers, vocabulary and KV pool are spread.
        expert_parallel_size: groups of so many devices among which a mixture's experts are dealt out; all else is
            spread over the devices of all groups.
        pipeline_parallel_size: groups of so many devices, each of which computes some of the layers.
        data_parallel_size: copies of all that: each has the whole model, a KV pool of its own and some of the
            requests.
        enable_dp_attention: each of the groups among which experts are dealt out is one device, which has attention
            and all else whole, and sequences, slots and a KV pool of its own; tokens go to their experts and back.
        sequence_parallel_norms: in prefill programs each device has the hidden states of some tokens between the parts
            of a layer: each sum over devices becomes a reduce-scatter, and an all-gather behind the norm.
    """

    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_dp_attention: bool = False
    sequence_parallel_norms: bool = False

    @property
    def dp_ranks(self) -> int:
        """Devices of which each serves sequences of its own."""
        return self.expert_parallel_size if self.enable_dp_attention else 1

    @property
    def devices(self) -> int:
        """Over which heads and the KV pool are spread."""
        return self.tensor_parallel_size * (1 if self.enable_dp_attention else self.expert_parallel_size)
