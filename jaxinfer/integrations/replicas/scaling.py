"""How many replicas a load wants. The standard library alone: orchestrators load this module by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

RUNNING, WAITING = "running", "waiting"
"""What a replica reports of its engine: sequences in slots, and sequences that wait for one."""


class Load(Protocol):
    """The part of Ray's ``AutoscalingContext`` that is of interest here."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...
    @property
    def target_num_replicas(self) -> int: ...


class QueueLength:
    """A policy of Ray Serve: as many replicas as the load of the engines asks for, see `wanted`.

    Delays, factors and bounds are Ray's: it applies them to what this says.
    """

    def __init__(self, target_ongoing_requests: float, target_waiting_requests: float) -> None:
        self._ongoing, self._waiting = target_ongoing_requests, target_waiting_requests

    def __call__(self, context: Load) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, as a fraction, and no state."""
        found = context.aggregated_metrics or {}
        if RUNNING not in found or WAITING not in found:  # nobody has reported yet
            return float(context.target_num_replicas), {}
        running, waiting = (sum(found[name].values()) for name in (RUNNING, WAITING))
        return wanted(running, waiting, self._ongoing, self._waiting), {}


def wanted(running: float, waiting: float, per_replica: float, waiting_per_replica: float) -> float:
    """Return for how many replicas there is work: the more of two counts.

    What runs and waits, by how much of that one replica should have; and what waits, by how much one may have waiting:
    an engine whose cache is full makes others wait however few run. At least 0, not rounded.

    Args:
        running: sequences that run, of all replicas together.
        waiting: sequences that wait in their engines.
        per_replica: of both for one replica.
        waiting_per_replica: of the second for one replica.
    """
    return max((running + waiting) / per_replica, waiting / waiting_per_replica)
