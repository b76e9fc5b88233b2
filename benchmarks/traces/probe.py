"""Counters of an engine, and the occupancy of its pages. The only module here that reads a scheduler's internals."""

from __future__ import annotations

from benchmarks.traces.replay import Counters, Occupancy
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.scheduling.stats import EngineStats


def counters(stats: EngineStats) -> Counters:
    return Counters(stats.prefix_queries, stats.prefix_hits, sum(stats.preemptions.values()))


def occupancy(scheduler: Scheduler) -> Occupancy:
    """Sum over the running sequences as planned: the last launched step is included."""
    running = scheduler._running.values()
    used = sum(sequence.scheduled for sequence in running)
    return Occupancy(used, sum(sequence.capacity for sequence in running))
