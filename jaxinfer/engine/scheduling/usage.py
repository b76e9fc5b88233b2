"""Memory and time of an engine's devices, as its statistics report them. No jax."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.parallel.driver import DriverFigures

PARTS = ("weights", "kv_cache", "states", "adapters", "encoder_cache", "slots", "temporaries")
"""What an engine keeps in device memory. ``temporaries``: the working set of the largest program, while it runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceUsage:
    """Memory and time of one device.

    Attributes:
        process: number of its process.
        device: its number in JAX, different for all devices of the engine.
        kind: JAX's name of its kind.
        parts: bytes of what the engine keeps there, by `PARTS`: from shapes, and from XLA's plans of the programs.
        in_use, peak, limit: bytes that JAX's allocator has given out, the most since the start, and the most that it
            may. None: the platform does not report them, as on a CPU.
        busy_seconds: time in which a step of the engine was launched and its results were not read yet.
        driver: figures of the driver; None: there are none.
    """

    process: int
    device: int
    kind: str
    parts: Mapping[str, int]
    in_use: int | None = None
    peak: int | None = None
    limit: int | None = None
    busy_seconds: float = 0.0
    driver: DriverFigures | None = None

    @property
    def known(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostUsage:
    """Host memory that the engine keeps in one process, in bytes: ``kv_pages`` of preempted sequences and evicted
    prefixes, and ``weights`` that are kept there."""

    process: int
    parts: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory and time of all devices of an engine.

    Attributes:
        seconds: since the engine was made: the wall time of `DeviceUsage.busy_seconds`.
    """

    devices: Sequence[DeviceUsage] = ()
    hosts: Sequence[HostUsage] = ()
    seconds: float = 0.0

    def timed(self, busy_seconds: float, seconds: float) -> Usage:
        """Return the same memory with the times of the engine that has these devices."""
        devices = [dataclasses.replace(each, busy_seconds=busy_seconds) for each in self.devices]
        return dataclasses.replace(self, devices=devices, seconds=seconds)


def joined(usages: Sequence[Usage]) -> Usage:
    """Return the usage of several engines: all their devices, and host memory by process."""
    hosts: dict[int, dict[str, int]] = {}
    for host in (host for usage in usages for host in usage.hosts):
        parts = hosts.setdefault(host.process, {})
        parts.update({name: parts.get(name, 0) + size for name, size in host.parts.items()})
    return Usage(
        devices=[device for usage in usages for device in usage.devices],
        hosts=[HostUsage(process=process, parts=parts) for process, parts in sorted(hosts.items())],
        seconds=max((usage.seconds for usage in usages), default=0.0),
    )


def usage_of(values: Mapping[str, Any]) -> Usage:
    """Return the `Usage` whose `dataclasses.asdict` another process has sent."""
    devices = [
        DeviceUsage(**{**each, "driver": None if each["driver"] is None else DriverFigures(**each["driver"])})
        for each in values["devices"]
    ]
    return Usage(devices=devices, hosts=[HostUsage(**each) for each in values["hosts"]])


class BusyTime:
    """Clock of the time in which at least one step is in flight. One thread counts, any may read.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start = clock, clock()
        self._state = (0, 0.0, 0.0)  # steps in flight, busy seconds before, and since when

    def begin(self) -> None:
        """Count a step that is launched."""
        steps, before, since = self._state
        self._state = (steps + 1, before, since if steps else self._clock())

    def end(self) -> None:
        """Count a step whose results were read."""
        steps, before, since = self._state
        self._state = (steps - 1, before if steps > 1 else before + self._clock() - since, since)

    @property
    def busy(self) -> float:
        """Seconds with a step in flight."""
        steps, before, since = self._state
        return before + (self._clock() - since if steps else 0.0)

    @property
    def seconds(self) -> float:
        """Seconds since this clock was made."""
        return self._clock() - self._start
