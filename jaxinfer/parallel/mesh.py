"""The device mesh, and the one table from logical axes to mesh axes. There is always a mesh, also for one device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.config import EngineConfig, EngineConfigError, ResolvedEngine
from jaxinfer.types import CacheSpec, ParamSpec, StateSpec

AXES = ("data", "stage", "dp_attn", "expert", "tensor")
_SETTINGS = {
    "data": "data_parallel_size",
    "stage": "pipeline_parallel_size",
    "dp_attn": "expert_parallel_size",
    "expert": "expert_parallel_size",
    "tensor": "tensor_parallel_size",
}

# Logical axes that are not listed are replicated. Experts are sharded over one mesh axis, and the hidden size of each
# over another; weights outside experts are sharded over both. Only experts are sharded over DP attention ranks, all
# else is per rank (`jaxinfer.engine.distributed.lockstep`).
_ALL = ("expert", "tensor")
RULES: dict[str, tuple[str, ...]] = {
    "kv_heads": _ALL,
    "heads": _ALL,
    "mlp": _ALL,
    "vocab": _ALL,
    "expert": ("dp_attn", "expert"),
    "expert_mlp": ("tensor",),
    "ranks": ("dp_attn",),  # arrays of all ranks, concatenated
    "tokens": _ALL,  # hidden states, in programs that are traced for it (`jaxinfer.parallel.tokens`)
}

# Logical axes that are replicated if the mesh axis does not divide them: a padded vocabulary would have tokens unknown
# to the tokenizer. All other axes must be divisible.
REPLICABLE = ("vocab",)


def make_mesh(
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
    *,
    expert: int = 1,
    dp_attn: int = 1,
    stage: int = 1,
    data: int = 1,
) -> Mesh:
    """Make a mesh over the first ``data * stage * dp_attn * expert * tensor`` devices (JAX's own, unless given).

    With several processes, the first has the last pipeline stage: tokens are sampled there, and it reads them.

    Raises:
        EngineConfigError: there are fewer devices, or a size is less than 1.
    """
    devices, shape = jax.devices() if devices is None else devices, (data, stage, dp_attn, expert, tensor)
    sizes, needed = dict(zip(AXES, shape, strict=True)), math.prod(shape)
    for axis, size in sizes.items():
        if size < 1:
            raise EngineConfigError(f"{_SETTINGS[axis]} = {size} must be at least 1")
    if len(devices) < needed:
        raise EngineConfigError(f"{asked(sizes)} {_too_few(needed, devices)}")
    placed, several = np.array(devices[:needed]).reshape(shape), len({device.process_index for device in devices}) > 1
    return _mesh(np.flip(placed, AXES.index("stage")) if several else placed)


def mesh_for(config: EngineConfig | ResolvedEngine, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make the mesh of an engine's settings.

    Raises:
        EngineConfigError: see `make_mesh`.
    """
    return make_mesh(
        config.tensor_parallel_size,
        devices,
        expert=1 if config.enable_dp_attention else config.expert_parallel_size,
        dp_attn=config.dp_ranks,
        stage=config.pipeline_parallel_size,
        data=config.data_parallel_size,
    )


def _mesh(devices: np.ndarray) -> Mesh:
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def require_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh if it has the axes of `make_mesh`.

    Raises:
        EngineConfigError: its axes have other names, or are Explicit.
    """
    if mesh.axis_names != AXES or set(mesh.axis_types) != {AxisType.Auto}:
        kinds = ", ".join(f"{name} ({kind.name})" for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True))
        raise EngineConfigError(
            f"mesh has the axes {kinds}, and must have {', '.join(AXES)} (Auto): "
            f"jaxinfer.parallel.mesh.make_mesh(tensor=..., data=...) makes one"
        )
    return mesh


def require_auto(name: str, array: Any) -> None:
    """Reject an array on a mesh with Explicit axes, the default of `jax.make_mesh`: XLA decides shardings here.

    Raises:
        TypeError: the array is on such a mesh, perhaps within a program that is being traced.
    """
    mesh = jax.typeof(array).sharding.mesh
    if mesh.explicit_axes:  # axes of a shard_map are Manual, and allowed
        raise TypeError(
            f"{name} lies on a mesh with Explicit axes {mesh.axis_names}: make the mesh with "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )


def replicas(mesh: Mesh) -> list[Mesh]:
    """Split a mesh along ``data`` into independent replicas."""
    return _along(mesh, "data")


def stages(mesh: Mesh) -> list[Mesh]:
    """Split a mesh along ``stage`` into pipeline stages, each of which computes some of the layers."""
    return _along(mesh, "stage")


def _along(mesh: Mesh, axis: str) -> list[Mesh]:
    place = AXES.index(axis)
    return [_mesh(part) for part in np.split(mesh.devices, mesh.devices.shape[place], axis=place)]


def asked(sizes: Mapping[str, int]) -> str:
    """Format the settings that make a mesh of these sizes, for messages."""
    wanted = {axis: sizes.get(axis, 1) for axis in AXES if axis == "tensor" or sizes.get(axis, 1) != 1}
    names, numbers = (_SETTINGS[axis] for axis in wanted), (str(size) for size in wanted.values())
    return f"{' x '.join(names)} = {' x '.join(numbers)}"


def devices_along(sizes: Mapping[str, int], axis: str | None) -> int:
    """Return the number of devices that a logical axis is sharded over, on a mesh of these sizes."""
    return math.prod(sizes.get(name, 1) for name in RULES.get(axis or "", ()))


def _too_few(needed: int, devices: Sequence[jax.Device]) -> str:
    platform = devices[0].platform
    needs = f"needs {needed} devices, and there {'is' if len(devices) == 1 else 'are'} {len(devices)} ({platform})"
    hint = f"; to try it on a CPU, start with XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
    return needs + (hint if platform == "cpu" else "")


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def param_sharding(mesh: Mesh, spec: ParamSpec) -> NamedSharding:
    """Return the sharding of a parameter: each of its logical axes on the mesh axis of `RULES`."""
    axes = (_mesh_axis(mesh.shape, axis, size) for axis, size in zip(spec.axes, spec.shape, strict=True))
    return NamedSharding(mesh, PartitionSpec(*axes))


def spread_over(axes: Sequence[str | None], shape: Sequence[int]) -> tuple[tuple[str, ...] | None, ...]:
    """Return the mesh axes over which each dimension of an array is sharded, in the program that is being traced."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(_mesh_axis(sizes, axis, size) for axis, size in zip(axes, shape, strict=True))


def _mesh_axis(sizes: Mapping[str, int], axis: str | None, size: int) -> tuple[str, ...] | None:
    names = RULES.get(axis or "")
    return None if axis in REPLICABLE and size % devices_along(sizes, axis) else names


def pool_sharding(mesh: Mesh, cache: CacheSpec) -> NamedSharding:
    """Return the sharding of a layer's pool: KV heads as in the parameters, latents (for all heads) replicated."""
    return NamedSharding(mesh, pool_spec(cache.latent))


def pool_spec(latent: bool) -> PartitionSpec:
    return PartitionSpec() if latent else PartitionSpec(None, None, RULES["kv_heads"])


def state_sharding(mesh: Mesh, state: StateSpec) -> NamedSharding:
    """Return the sharding of a layer's states of one kind, ``[states, heads, ...]``."""
    return NamedSharding(mesh, PartitionSpec() if state.whole else PartitionSpec(None, RULES["heads"]))


def page_sharding(mesh: Mesh, cache: CacheSpec) -> NamedSharding:
    """Return the sharding of all layers' pages in transfer to the host, ``[pages, layers, *page]``: as in the pools."""
    return NamedSharding(mesh, PartitionSpec(None, None, *tuple(pool_spec(cache.latent))[1:]))


def gathered_logits(logits: Float[Array, "*batch vocab"]) -> Float[Array, "*batch vocab"]:
    """Replicate logits over the mesh that the program is traced for.

    Each device computes its share of the vocabulary, and the logits are gathered once. If only the result were
    constrained to be replicated, XLA would gather the weight.
    """
    if jax.sharding.get_abstract_mesh().size <= 1 or traced_dp_ranks() > 1:
        return logits
    if logits.shape[-1] % traced_size("vocab") == 0:
        split = PartitionSpec(*(None,) * (logits.ndim - 1), RULES["vocab"])
        logits = jax.lax.with_sharding_constraint(logits, split)
    return jax.lax.with_sharding_constraint(logits, PartitionSpec())


def traced_for(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Trace for this mesh while the context lasts: see `traced_size`."""
    abstract = mesh.abstract_mesh
    # An abstract device (pallas_kernels.check) has more properties than the mesh describes.
    device = jax.sharding.get_abstract_mesh().abstract_device or abstract.abstract_device
    return jax.sharding.use_abstract_mesh(abstract.update(abstract_device=device))


def traced_size(axis: str) -> int:
    """Return the number of devices along a logical axis, in the mesh of the program being traced; 1 without a mesh."""
    return devices_along(jax.sharding.get_abstract_mesh().shape, axis)


def traced_dp_ranks() -> int:
    """Return the number of ranks if the traced program is one rank's, which sees that rank's arrays alone. Else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape["dp_attn"] if "dp_attn" in mesh.manual_axes else 1
