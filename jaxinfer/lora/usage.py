"""What an engine tells of its adapters. No jax."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True)
class LoRAUsage:
    """Adapters of one engine, or of several, at one moment.

    Attributes:
        loaded: names that requests may give.
        slots: of the device's banks.
        slots_used: those that hold an adapter, or are being given one.
        loads: adapters that were given a slot, so far.
        evictions: adapters that lost theirs to another one, so far.
        running: sequences in slots of the batch, by the names of their adapters; names without any are left out.
        waiting: the same of sequences that wait for a slot of the batch, whatever keeps them.
    """

    loaded: int
    slots: int
    slots_used: int
    loads: int
    evictions: int
    running: Mapping[str, int]
    waiting: Mapping[str, int]


def merged_usage(usages: Sequence[LoRAUsage]) -> LoRAUsage:
    """The figures of several engines that share their names, as those of one."""
    found = {field.name: [getattr(each, field.name) for each in usages] for field in dataclasses.fields(LoRAUsage)}
    slots, used, loads, evictions = (sum(found[name]) for name in ("slots", "slots_used", "loads", "evictions"))
    running, waiting = _added(found["running"]), _added(found["waiting"])
    return LoRAUsage(max(found["loaded"]), slots, used, loads, evictions, running, waiting)


def _added(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total = collections.Counter[str]()
    for each in counts:
        total.update(each)
    return dict(total)


@runtime_checkable
class LoadRecorder(Protocol):
    """Protocol of who keeps the times (`jaxinfer.engine.scheduling.stats.StatsRecorder`)."""

    def lora_wanted(self) -> float:
        """The time at which an adapter is missing, for `lora_loaded`."""
        ...

    def lora_loaded(self, wanted: float) -> None:
        """Note that an adapter can be used that somebody has waited for since ``wanted``."""
        ...
