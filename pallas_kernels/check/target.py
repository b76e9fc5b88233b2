"""Targets to compile kernels for without a GPU; their device descriptions are next to this file (``*.txtpb``)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from pallas_kernels.specs import ADA, AMPERE, H200, HOPPER

_OF_MACHINE = 8


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine code and the device that represents it.

    Attributes:
        name: name of the machine code, with the device where several devices share the code.
        capability: as CUDA writes it: "9.0".
        device: name of the device description.
    """

    name: str
    capability: str
    device: str

    @property
    def description(self) -> str:
        """The device description for XLA's compiler (a text protocol buffer)."""
        return pathlib.Path(__file__).with_name(f"{self.device}.txtpb").read_text(encoding="utf-8")

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one CTA may have. Mosaic GPU always assumes Hopper's limit."""
        found = re.search(r"shared_memory_per_block_optin: (\d+)", self.description)
        assert found is not None
        return int(found[1])

    @functools.cached_property
    def topology(self) -> Any:
        """A topology of one device. Needs JAX's CUDA plugin, but neither a driver nor a GPU."""
        return self._machines(1, 1)

    def devices(self, count: int) -> Sequence[Any]:
        """Return devices of this kind, in machines with eight of them."""
        return self._machines(-(-count // _OF_MACHINE), min(count, _OF_MACHINE)).devices[:count]

    def _machines(self, count: int, each: int) -> Any:
        shape = f"1x{count}x{each}"
        return topologies.get_topology_desc(platform="cuda", target_config=self.description, topology=shape)

    @property
    def sharding(self) -> jax.sharding.SingleDeviceSharding:
        return jax.sharding.SingleDeviceSharding(self.topology.devices[0])

    @functools.cached_property
    def _abstract_device(self) -> jax.sharding.AbstractDevice:
        device = self.topology.devices[0]
        # Mosaic GPU reads the capability from the abstract device, whose class has no field for it.
        kind = type("Device", (jax.sharding.AbstractDevice,), {"compute_capability": self.capability})
        told: jax.sharding.AbstractDevice = kind(
            device_kind=device.device_kind, num_cores=device.core_count, platform="gpu"
        )
        return told

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this device the target of programs that are traced and lowered within."""
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=self._abstract_device)
        with jax.sharding.use_abstract_mesh(mesh):
            yield

    def tell(self, mesh: jax.sharding.Mesh) -> None:
        """Set the abstract device of a mesh of such devices to the one that `current` uses.

        JAX 0.11 compares the mesh of an argument with the mesh that a program is traced for.
        """
        # JAX creates it from the devices on first use, and caches it here.
        mesh.__dict__["abstract_mesh"] = mesh.abstract_mesh.update(abstract_device=self._abstract_device)

    def compile(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        donated: Sequence[int] = (),
        options: dict[str, Any] | None = None,
    ) -> jax.stages.Compiled:
        """Compile ``function`` for this device.

        Args:
            arguments: trees of `jax.ShapeDtypeStruct`.
            donated: indices of the donated arguments.
            options: XLA compiler options of this program.
        """
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding), arguments)
        jitted = jax.jit(function, donate_argnums=tuple(donated))
        with self.current():
            return jitted.trace(*placed).lower(lowering_platforms=("cuda",)).compile(compiler_options=options)


_ALL = (
    Target(HOPPER, "9.0", "h100"),
    Target(H200, "9.0", "h200"),
    Target(AMPERE, "8.0", "a100"),
    Target(ADA, "8.9", "l40s"),
)
TARGETS = {target.name: target for target in _ALL}
DEVICES = {target.device: target for target in _ALL}
