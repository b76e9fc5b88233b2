"""Pipeline links: carry a stage's hidden states to the devices of the next stage, possibly in another process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.parallel.mesh import replicated
from jaxinfer.parallel.processes import own_devices, processes_of, put_whole

_ENDS, _PLACES = "ends", "places"


class Link:
    """Link from one stage to the next: each device sends its shard to the device with the same index.

    Within a process the link is a copy from device to device. Between processes it is a program on all devices of both
    stages: one collective, which waits for both ends, on the devices only. Every process that has devices of either
    stage makes the same calls in the same order; in other processes a call does nothing.

    Attributes:
        crosses: whether this process runs such a program.

    Args:
        source, target: meshes of the stages, of the same shape.
        width, dtype: of hidden states.
        rows: possible numbers of rows; a program is compiled for each.
    """

    def __init__(self, source: Mesh, target: Mesh, width: int, dtype: jnp.dtype, rows: Iterable[int]) -> None:
        self._width, self._arriving = width, replicated(target)
        gives, self._takes = bool(own_devices(source)), bool(own_devices(target))
        self._programs: Mapping[int, jax.stages.Compiled] = {}
        self._nothing: Mapping[int, Array] = {}
        self.crosses = (gives or self._takes) and len({*processes_of(source), *processes_of(target)}) > 1
        if not self.crosses:
            return
        devices = np.stack([mesh.devices.reshape(-1) for mesh in (source, target)])
        mesh = Mesh(devices, (_ENDS, _PLACES), axis_types=(AxisType.Auto,) * 2)
        self._both = NamedSharding(mesh, PartitionSpec(_ENDS))
        self._programs = {count: self._compiled(mesh, count, dtype) for count in sorted(set(rows))}
        if not gives:
            zeros = {count: np.zeros((count, width), dtype) for count in self._programs}
            self._nothing = put_whole(zeros, self._arriving)

    def _compiled(self, mesh: Mesh, rows: int, dtype: jnp.dtype) -> jax.stages.Compiled:
        def forward(x: Array) -> Array:
            return jax.lax.ppermute(x, _ENDS, [(0, 1)])

        program = jax.shard_map(forward, mesh=mesh, in_specs=PartitionSpec(_ENDS), out_specs=PartitionSpec(_ENDS))
        operand = jax.ShapeDtypeStruct((2 * rows, self._width), dtype, sharding=self._both)
        return jax.jit(program, out_shardings=self._both).lower(operand).compile()

    def carry(self, rows: int, x: Float[Array, "rows width"] | None) -> Float[Array, "rows width"] | None:
        """Send hidden states, without waiting; return those that arrive at this process's devices (None: it has none).

        Args:
            x: hidden states of the previous stage, on its devices; None if this process has none of these devices.
        """
        if not self.crosses:
            return None if x is None else jax.device_put(x, self._arriving)
        operand = self._nothing[rows] if x is None else x
        shape = (2 * rows, self._width)
        sent = self._programs[rows](jax.make_array_from_single_device_arrays(shape, self._both, _shards(operand)))
        if not self._takes:
            return None
        return jax.make_array_from_single_device_arrays((rows, self._width), self._arriving, _shards(sent))


def _shards(x: Array) -> list[Array]:
    return [shard.data for shard in x.addressable_shards]
