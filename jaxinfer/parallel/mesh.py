"""The device mesh and the one table from logical axes to mesh axes. There is always a mesh, also for one device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfer.types import ParamSpec

AXES = ("data", "stage", "expert", "tensor")

# A logical axis that is not listed is replicated.
RULES: dict[str, str] = {"kv_heads": "tensor", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over one device (the first, unless given)."""
    device = (devices or jax.devices())[0]
    return Mesh(np.array([device]).reshape(1, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def param_sharding(mesh: Mesh, spec: ParamSpec) -> NamedSharding:
    """Where a parameter lies: each of its logical axes on the mesh axis of `RULES`."""
    return NamedSharding(mesh, PartitionSpec(*(RULES.get(axis or "") for axis in spec.axes)))
