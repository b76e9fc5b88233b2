"""LoRA usage counters of an engine. No jax."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True)
class LoRAUsage:
    """LoRA usage of one engine, or of several, at one moment.

    Attributes:
        loaded: names that requests may use.
        slots: slots in the device's banks.
        slots_used: slots that hold or are loading an adapter.
        loads: adapters placed in a slot so far.
        evictions: adapters evicted from a slot so far.
        running: sequences in the batch by adapter name; names without any are left out.
        waiting: waiting sequences by adapter name, for any reason; names without any are left out.
    """

    loaded: int
    slots: int
    slots_used: int
    loads: int
    evictions: int
    running: Mapping[str, int]
    waiting: Mapping[str, int]


def merged_usage(usages: Sequence[LoRAUsage]) -> LoRAUsage:
    """Combine the usage of several engines that share adapter names."""
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
    """Protocol of the recorder of load times (`jaxinfer.engine.scheduling.stats.StatsRecorder`)."""

    def lora_wanted(self) -> float:
        """Return the current time when an adapter is missing, for `lora_loaded`."""
        ...

    def lora_loaded(self, wanted: float) -> None:
        """Record that an adapter, awaited since ``wanted``, is now usable."""
        ...
