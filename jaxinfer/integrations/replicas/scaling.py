"""Autoscaling policy by engine load. Imports only the standard library: orchestrators load this module directly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

RUNNING, WAITING = "running", "waiting"
"""Metric names of a replica: sequences in slots, and sequences that wait for a slot."""


class Load(Protocol):
    """The subset of Ray's ``AutoscalingContext`` that is used here."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...
    @property
    def target_num_replicas(self) -> int: ...


class QueueLength:
    """Autoscaling policy of Ray Serve: the number of replicas follows the engines' load, see `wanted`.

    Ray applies its own delays, factors and bounds to the result.
    """

    def __init__(self, target_ongoing_requests: float, target_waiting_requests: float) -> None:
        self._ongoing, self._waiting = target_ongoing_requests, target_waiting_requests

    def __call__(self, context: Load) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas as a fraction, and an empty state."""
        found = context.aggregated_metrics or {}
        if RUNNING not in found or WAITING not in found:  # no metrics were reported yet
            return float(context.target_num_replicas), {}
        running, waiting = (sum(found[name].values()) for name in (RUNNING, WAITING))
        return wanted(running, waiting, self._ongoing, self._waiting), {}


def wanted(running: float, waiting: float, per_replica: float, waiting_per_replica: float) -> float:
    """Return the number of replicas for a load: the larger of two counts.

    One divides running plus waiting sequences by their target per replica. The other divides waiting sequences by
    theirs, because an engine with a full KV cache queues requests even if few run. At least 0, not rounded.

    Args:
        running: running sequences of all replicas together.
        waiting: sequences that wait in their engines.
        per_replica: target of running plus waiting sequences per replica.
        waiting_per_replica: target of waiting sequences per replica.
    """
    return max((running + waiting) / per_replica, waiting / waiting_per_replica)
