"""Adapter data types in the shapes of a model's own parameters. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Delta:
    """An adapter's change to one parameter: a product with it becomes ``magnitude * (base + x a^T b^T) + bias``.

    ``b`` includes the adapter's scale. For a parameter fused from several checkpoint tensors (queries, keys and values;
    gate and up) the A matrices are stacked, and ``b`` has zeros where the rank of one tensor meets the outputs of
    another. Outputs have the parameter's dimensions except the inputs, in their order.

    Arrays are float32 numpy arrays if the adapter was read from files, and JAX arrays or tracers in training.

    Attributes:
        a: [rank, in]; for experts [experts, rank, in]. For an embedding: [rank, vocab].
        b: [*out, rank]; for experts [experts, *out, rank].
        magnitude: DoRA magnitude (Liu et al. 2024), already divided by the norm of the weight it scales; None: 1.
        bias: added after the magnitude; None: no bias.
    """

    a: Any
    b: Any
    magnitude: Any = None
    bias: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter for one model.

    Attributes:
        identity: hexadecimal SHA-256 of its weights and of all configuration that affects results; empty if it was not
            read from files.
        rank: the largest rank of its modules.
        deltas: changes by the path of the parameter, such as ``("layers_0", "attention", "qkv")``.
    """

    identity: str
    rank: int
    deltas: Mapping[tuple[str, ...], Delta]
