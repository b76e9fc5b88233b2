"""Adapter data types in the shapes of a model's own parameters. No jax."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np


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

    @property
    def rank(self) -> int:
        """The rank; 0 if ``a`` is no matrix."""
        rank: int = (0, 0, *np.shape(self.a))[-2]
        return rank


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

    def on_host(self) -> Adapter:
        """Return copies of the arrays as float32 numpy arrays, with the identity of this content."""
        digest, deltas = hashlib.sha256(b"arrays"), dict[tuple[str, ...], Delta]()
        for path, delta in sorted(self.deltas.items()):
            values = {field.name: getattr(delta, field.name) for field in dataclasses.fields(delta)}
            arrays = {name: np.array(value, np.float32) for name, value in values.items() if value is not None}
            for name, array in arrays.items():
                digest.update(f"{'/'.join(path)} {name} {array.shape}".encode() + array.tobytes())
            deltas[path] = Delta(**arrays)
        rank = max((delta.rank for delta in deltas.values()), default=0)
        return Adapter(digest.hexdigest(), rank, deltas)
