"""The device mesh and the one table from logical axes to mesh axes. There is always a mesh, also for one device."""

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

# A logical axis that is not listed is replicated. Experts are dealt out along one axis, and each one's hidden size
# along another; what is not an expert's is spread over all these devices alike. Ranks have experts dealt out among
# them, and all else for themselves (`jaxinfer.engine.distributed.dp_attention`).
_ALL = ("expert", "tensor")
RULES: dict[str, tuple[str, ...]] = {
    "kv_heads": _ALL,
    "heads": _ALL,
    "mlp": _ALL,
    "vocab": _ALL,
    "expert": ("dp_attn", "expert"),
    "expert_mlp": ("tensor",),
    "ranks": ("dp_attn",),  # of what each has for itself, one after another
    "tokens": _ALL,  # of hidden states, in programs that are traced for it (`jaxinfer.parallel.tokens`)
}

# Axes of these names are replicated where the mesh axis does not divide them: a padded vocabulary would have tokens
# that no tokenizer knows. All others must be divisible.
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
    """A mesh over the first ``data * stage * dp_attn * expert * tensor`` devices (JAX's own, unless given).

    Of several processes the first has the last pipeline stage: there tokens are sampled, and it is who reads them.

    Raises:
        EngineConfigError: there are fewer.
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
    """The mesh of an engine's settings.

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
    """Return the mesh, if it is one of `make_mesh`.

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
    """Refuse an array on a mesh whose axes are Explicit, as `jax.make_mesh` makes them unless told otherwise: where
    results lie is left to XLA here.

    Raises:
        TypeError: it is one, perhaps within a program that is being traced.
    """
    mesh = jax.typeof(array).sharding.mesh
    if mesh.explicit_axes:  # those of a shard_map are Manual, and welcome
        raise TypeError(
            f"{name} lies on a mesh with Explicit axes {mesh.axis_names}: make the mesh with "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )


def replicas(mesh: Mesh) -> list[Mesh]:
    """The parts of a mesh along ``data``: what runs on one of them knows nothing of the others."""
    return _along(mesh, "data")


def stages(mesh: Mesh) -> list[Mesh]:
    """The parts of a mesh along ``stage``: each computes some of the layers."""
    return _along(mesh, "stage")


def _along(mesh: Mesh, axis: str) -> list[Mesh]:
    place = AXES.index(axis)
    return [_mesh(part) for part in np.split(mesh.devices, mesh.devices.shape[place], axis=place)]


def asked(sizes: Mapping[str, int]) -> str:
    """The settings that make a mesh of these sizes, for messages."""
    wanted = {axis: sizes.get(axis, 1) for axis in AXES if axis == "tensor" or sizes.get(axis, 1) != 1}
    names, numbers = (_SETTINGS[axis] for axis in wanted), (str(size) for size in wanted.values())
    return f"{' x '.join(names)} = {' x '.join(numbers)}"


def devices_along(sizes: Mapping[str, int], axis: str | None) -> int:
    """Number of devices that a logical axis is spread over, on a mesh of these sizes."""
    return math.prod(sizes.get(name, 1) for name in RULES.get(axis or "", ()))


def _too_few(needed: int, devices: Sequence[jax.Device]) -> str:
    platform = devices[0].platform
    needs = f"needs {needed} devices, and there {'is' if len(devices) == 1 else 'are'} {len(devices)} ({platform})"
    hint = f"; to try it on a CPU, start with XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
    return needs + (hint if platform == "cpu" else "")


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def param_sharding(mesh: Mesh, spec: ParamSpec) -> NamedSharding:
    """Sharding of a parameter: each of its logical axes on the mesh axis of `RULES`."""
    axes = (_mesh_axis(mesh.shape, axis, size) for axis, size in zip(spec.axes, spec.shape, strict=True))
    return NamedSharding(mesh, PartitionSpec(*axes))


def spread_over(axes: Sequence[str | None], shape: Sequence[int]) -> tuple[tuple[str, ...] | None, ...]:
    """The mesh axes over which each dimension of an array lies, in the program that is being traced."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(_mesh_axis(sizes, axis, size) for axis, size in zip(axes, shape, strict=True))


def _mesh_axis(sizes: Mapping[str, int], axis: str | None, size: int) -> tuple[str, ...] | None:
    names = RULES.get(axis or "")
    return None if axis in REPLICABLE and size % devices_along(sizes, axis) else names


def pool_sharding(mesh: Mesh, cache: CacheSpec) -> NamedSharding:
    """Sharding of a layer's pool: KV heads where those of the parameters are, latents (for all heads) replicated."""
    return NamedSharding(mesh, pool_spec(cache.latent))


def pool_spec(latent: bool) -> PartitionSpec:
    return PartitionSpec() if latent else PartitionSpec(None, None, RULES["kv_heads"])


def state_sharding(mesh: Mesh, state: StateSpec) -> NamedSharding:
    """Sharding of a layer's states of one kind, ``[states, heads, ...]``."""
    return NamedSharding(mesh, PartitionSpec() if state.whole else PartitionSpec(None, RULES["heads"]))


def page_sharding(mesh: Mesh, cache: CacheSpec) -> NamedSharding:
    """Sharding of all layers' pages on their way to the host, ``[pages, layers, *page]``: as in the pools."""
    return NamedSharding(mesh, PartitionSpec(None, None, *tuple(pool_spec(cache.latent))[1:]))


def gathered_logits(logits: Float[Array, "*batch vocab"]) -> Float[Array, "*batch vocab"]:
    """Logits on every device of the mesh that the program is traced for.

    Each device computes those of its part of the vocabulary, and they are gathered once. Were only the result asked
    for everywhere, XLA would gather the weight.
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
    # A device that is only described (pallas_kernels.check) knows more of itself than the mesh does.
    device = jax.sharding.get_abstract_mesh().abstract_device or abstract.abstract_device
    return jax.sharding.use_abstract_mesh(abstract.update(abstract_device=device))


def traced_size(axis: str) -> int:
    """Devices along a logical axis, in the mesh of the program that is being traced; 1 where there is none."""
    return devices_along(jax.sharding.get_abstract_mesh().shape, axis)


def traced_dp_ranks() -> int:
    """Ranks of the program that is being traced, where it is one rank's: it sees that rank's arrays alone. Else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape["dp_attn"] if "dp_attn" in mesh.manual_axes else 1
