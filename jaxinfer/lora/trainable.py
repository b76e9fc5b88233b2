"""Trainable adapters: initialisation, and registration of their arrays as pytree leaves."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.lora.merge import declared
from jaxinfer.lora.parts import parts
from jaxinfer.models.model import Model
from jaxinfer.quant.banks import lora_targets
from jaxinfer.types import LoRATarget

Path = tuple[str, ...]


def init_adapter(model: Model, rank: int, key: jax.Array, names: Collection[str] | None = None) -> Adapter:
    """Return a new adapter that changes nothing yet: normal A of variance 1 / inputs, and zero B (Hu et al. 2021).

    It is a pytree of float32 arrays, as every `Adapter` is once this module is imported: `jax.grad` of a function of
    ``model.with_lora(adapter)`` has its structure. A parameter fused from several checkpoint tensors has a single A.

    Args:
        rank: rank for each parameter.
        key: PRNG key.
        names: names of parameters within a layer ("qkv", "down"); None: all products of the layers except those of
            experts.

    Raises:
        ValueError: the rank is not positive, or a name matches no adaptable parameter.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank} and must be at least 1")
    targets = _targets(model)
    chosen = {path: target for path, target in targets.items() if names is None or path[-1] in names}
    if unknown := sorted({*(names or ())} - {path[-1] for path in targets}):
        known = ", ".join(sorted({path[-1] for path in targets}))
        raise ValueError(f"names: {unknown[0]!r} is no parameter that a new adapter can change; there are {known}")
    keys = jax.random.split(key, len(chosen))
    deltas = {path: _initial(target, rank, one) for (path, target), one in zip(chosen.items(), keys, strict=True)}
    return Adapter("", rank, deltas)


def traced_parts(adapter: Adapter, targets: Mapping[Path, LoRATarget]) -> dict[str, Float32[Array, "..."]]:
    """Return all arrays of a bank slot, see `parts`, for an adapter of JAX arrays or tracers."""
    whole = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), adapter)
    return {name: array for part in parts(whole, targets, jnp) for name, array in part.items()}


def _targets(model: Model) -> dict[Path, LoRATarget]:
    found = lora_targets(model.specs, declared(model), 1)
    return {path: target for path, target in found.items() if len(target.a) == 2}


def _initial(target: LoRATarget, rank: int, key: jax.Array) -> Delta:
    inputs = target.a[-1]
    a = jax.random.normal(key, (rank, inputs)) * inputs**-0.5
    return Delta(np.asarray(a), np.zeros((*target.b[:-1], rank), np.float32))


jax.tree_util.register_dataclass(Delta, ["a", "b", "magnitude", "bias"], [])
jax.tree_util.register_dataclass(Adapter, ["deltas"], ["identity", "rank"])
