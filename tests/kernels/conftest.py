"""Thread limits of interpreted kernels: a warpgroup waiting at a barrier blocks an XLA thread."""

import functools
import os
import pathlib

import pytest

THREADS = 8
"""XLA threads needed. The widest kernel has five warpgroups; with too few threads the interpreter deadlocks."""

TESTS = pathlib.Path(__file__).parent.parent

INTERPRETED = (
    "kernels/test_mosaic_",
    "kernels/paged_attention/test_hopper_",
    "kernels/paged_attention/test_ampere",
    "kernels/test_mla_attention",
    "kernels/trial/test_mosaic_",
    "kernels/test_tune",
    "gpu_check/test_gpu_check",
)


def threads() -> int:
    """Return the number of XLA threads in this process: NPROC if set, else the number of available cores."""
    return int(os.environ.get("NPROC", len(os.sched_getaffinity(0))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark interpreted tests, and deselect them where they could hang: `make test-interpreted` has more threads."""
    ours = {item for item in items if _below_tests(item.path).startswith(INTERPRETED)}
    for item in ours:
        item.add_marker("interpreted")
    if threads() < THREADS and ours:
        config.hook.pytest_deselected(items=list(ours))
        items[:] = [item for item in items if item not in ours]


@functools.cache
def _below_tests(path: pathlib.Path) -> str:
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
