"""Interpreted kernels need threads: those that wait at a barrier hold one of XLA's each, and others must go on."""

import functools
import os
import pathlib

import pytest

THREADS = 8
"""Of XLA. The widest kernel has five warpgroups; with too few threads the interpreter waits for ever."""

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
    """XLA's threads in this process: as many as there are cores, if NPROC does not say another number."""
    return int(os.environ.get("NPROC", len(os.sched_getaffinity(0))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks them, and leaves them out where they could hang: `make test-interpreted` has more threads."""
    ours = {item for item in items if _below_tests(item.path).startswith(INTERPRETED)}
    for item in ours:
        item.add_marker("interpreted")
    if threads() < THREADS and ours:
        config.hook.pytest_deselected(items=list(ours))
        items[:] = [item for item in items if item not in ours]


@functools.cache
def _below_tests(path: pathlib.Path) -> str:
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
