"""Thread limits of interpreted kernels: a warpgroup waiting at a barrier blocks an XLA thread."""

import os

import pytest

from tests.tiers import environment_of

THREADS = 8
"""XLA threads needed. The widest kernel has five warpgroups; with too few threads the interpreter deadlocks."""


def threads() -> int:
    """Return the number of XLA threads in this process: NPROC if set, else the number of available cores."""
    return int(os.environ.get("NPROC", len(os.sched_getaffinity(0))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark interpreted tests, and deselect them where they could hang: `make test-interpreted` has more threads."""
    ours = {item for item in items if environment_of(item.path) == "interpreted"}
    for item in ours:
        item.add_marker("interpreted")
    if threads() < THREADS and ours:
        config.hook.pytest_deselected(items=list(ours))
        items[:] = [item for item in items if item not in ours]
