"""Random adapters."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.quant.banks import ALL_LINEAR, lora_targets
from jaxinfer.types import ParamTree


def drawn(specs: ParamTree, name: str, rank: int = 4, modules: Sequence[str] = (ALL_LINEAR,)) -> Adapter:
    """Draw an adapter, seeded by its name, for every weight that can have one, with magnitudes and biases.

    Args:
        specs: parameters as the family declares them.
        modules: see `lora_targets`.
    """
    rng, deltas = np.random.default_rng(zlib.crc32(name.encode())), {}
    for path, target in lora_targets(specs, specs, rank, modules).items():
        arrays = {kind: rng.normal(0, 0.1, shape).astype(np.float32) for kind, shape in target.shapes.items()}
        arrays["magnitude"] += 1.0
        deltas[path] = Delta(**arrays)
    return Adapter(name, rank, deltas)
