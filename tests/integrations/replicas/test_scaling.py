"""Tests of the number of replicas for a load."""

import dataclasses
import importlib
import math
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.integrations.replicas.scaling import QueueLength, wanted
from jaxinfer.integrations.replicas.settings import POLICY

COUNTS = st.floats(0, 1e6)
TARGETS = st.floats(0.1, 1e4)


@dataclasses.dataclass
class Load:
    aggregated_metrics: Mapping[str, Mapping[str, float]] | None
    target_num_replicas: int = 1


def test_the_name_of_the_policy_is_that_of_the_class() -> None:
    module, _, name = POLICY.rpartition(".")
    assert getattr(importlib.import_module(module), name) is QueueLength


def test_what_runs_and_waits_counts_for_all_replicas_together() -> None:
    load = Load({"running": {"a": 20.0, "b": 30.0}, "waiting": {"a": 0.0, "b": 2.0}})
    assert QueueLength(10.0, 8.0)(load) == (5.2, {})


def test_what_waits_counts_where_little_runs() -> None:
    """Waiting requests add replicas even if few run, because the engine's KV cache is full."""
    assert QueueLength(100.0, 4.0)(Load({"running": {"a": 2.0}, "waiting": {"a": 12.0}}))[0] == 3.0


def test_before_anybody_has_reported_nothing_changes() -> None:
    for found in (None, {}, {"running": {"a": 9.0}}):
        assert QueueLength(1.0, 1.0)(Load(found, target_num_replicas=3)) == (3.0, {})


def test_without_load_none_is_wanted() -> None:
    assert wanted(0, 0, 10, 10) == 0


@given(COUNTS, COUNTS, TARGETS, TARGETS)
def test_with_so_many_each_has_no_more_than_it_should(
    running: float, waiting: float, both: float, queue: float
) -> None:
    replicas = max(1, math.ceil(wanted(running, waiting, both, queue)))
    assert (running + waiting) / replicas <= both * (1 + 1e-9)
    assert waiting / replicas <= queue * (1 + 1e-9)
    if replicas > 1:  # one replica fewer would exceed a target
        fewer = replicas - 1
        assert max((running + waiting) / fewer / both, waiting / fewer / queue) >= 1 - 1e-9
