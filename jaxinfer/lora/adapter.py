"""An adapter in the shapes of a model's own parameters. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Delta:
    """What an adapter changes of one parameter: a product with it becomes ``magnitude * (base + x a^T b^T) + bias``.

    ``b`` has the adapter's scale in it already. A parameter that holds several of a checkpoint's tensors (queries, keys
    and values; gate and up) has the rows of each one's A below one another, and zeros in ``b`` where one's rank meets
    another's outputs. Outputs have the parameter's dimensions but for its inputs', in their order.

    Arrays are numpy's, in float32, where an adapter was read. Where it is trained they are whatever JAX puts there.

    Attributes:
        a: [rank, in]; of experts [experts, rank, in]. Of an embedding: [rank, vocab].
        b: [*out, rank]; of experts [experts, *out, rank].
        magnitude: of DoRA (Liu et al. 2024), already over the norm of what it scales; None: it is 1.
        bias: added behind that; None: nothing.
    """

    a: Any
    b: Any
    magnitude: Any = None
    bias: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter for one model.

    Attributes:
        identity: SHA-256 of its weights and of all of its configuration that changes a result, hexadecimal; empty where
            it was not read from files.
        rank: the largest of its modules'.
        deltas: by the path of the parameter in the model's tree, such as ``("layers_0", "attention", "qkv")``.
    """

    identity: str
    rank: int
    deltas: Mapping[tuple[str, ...], Delta]
