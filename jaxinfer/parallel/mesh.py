"""The device mesh and the one table from logical axes to mesh axes. There is always a mesh, also for one device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.config import EngineConfigError
from jaxinfer.types import CacheSpec, ParamSpec

AXES = ("data", "stage", "expert", "tensor")

# A logical axis that is not listed is replicated.
RULES: dict[str, str] = {"kv_heads": "tensor", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}

# Axes of these names are replicated where the mesh axis does not divide them: a padded vocabulary would have tokens
# that no tokenizer knows. All others must be divisible.
REPLICABLE = ("vocab",)


def make_mesh(tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first ``tensor`` devices (JAX's own, unless given).

    Raises:
        EngineConfigError: there are fewer.
    """
    devices = jax.devices() if devices is None else devices
    if tensor < 1:
        raise EngineConfigError(f"tensor_parallel_size = {tensor} must be at least 1")
    if len(devices) < tensor:
        raise EngineConfigError(f"tensor_parallel_size = {tensor} {_too_few(tensor, devices)}")
    shape = (1,) * (len(AXES) - 1) + (tensor,)
    return Mesh(np.array(devices[:tensor]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _too_few(needed: int, devices: Sequence[jax.Device]) -> str:
    platform = devices[0].platform
    there = f"needs {needed} devices, and there {'is' if len(devices) == 1 else 'are'} {len(devices)} ({platform})"
    hint = f"; to try it on a CPU, start with XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
    return there + (hint if platform == "cpu" else "")


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def param_sharding(mesh: Mesh, spec: ParamSpec) -> NamedSharding:
    """Where a parameter lies: each of its logical axes on the mesh axis of `RULES`."""
    axes = (_mesh_axis(mesh, axis, size) for axis, size in zip(spec.axes, spec.shape, strict=True))
    return NamedSharding(mesh, PartitionSpec(*axes))


def _mesh_axis(mesh: Mesh, axis: str | None, size: int) -> str | None:
    name = RULES.get(axis or "")
    return None if name is None or (axis in REPLICABLE and size % mesh.shape[name]) else name


def pool_sharding(mesh: Mesh, cache: CacheSpec) -> NamedSharding:
    """Where a layer's pool lies: KV heads where those of the parameters are, latents (they serve all) everywhere."""
    return NamedSharding(mesh, pool_spec(cache.latent))


def pool_spec(latent: bool) -> PartitionSpec:
    return PartitionSpec() if latent else PartitionSpec(None, None, RULES["kv_heads"])


def gathered_logits(logits: Float[Array, "*batch vocab"]) -> Float[Array, "*batch vocab"]:
    """Logits on every device of the mesh that the program is traced for.

    Each device computes those of its part of the vocabulary, and they are gathered once. Were only the result asked
    for everywhere, XLA would gather the weight.
    """
    if jax.sharding.get_abstract_mesh().size <= 1:
        return logits
    if logits.shape[-1] % traced_size(RULES["vocab"]) == 0:
        own = PartitionSpec(*(None,) * (logits.ndim - 1), RULES["vocab"])
        logits = jax.lax.with_sharding_constraint(logits, own)
    return jax.lax.with_sharding_constraint(logits, PartitionSpec())


def traced_for(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """While it lasts, what is traced is for this mesh: see `traced_size`."""
    abstract = mesh.abstract_mesh
    # A device that is only described (pallas_kernels.check) knows more of itself than the mesh does.
    told = jax.sharding.get_abstract_mesh().abstract_device or abstract.abstract_device
    return jax.sharding.use_abstract_mesh(abstract.update(abstract_device=told))


def traced_size(axis: str) -> int:
    """Devices along a mesh axis, in the mesh that the program which is being traced is for; 1 where there is none."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)
