"""Current speed of this machine relative to the one on which the CPU-time bounds of tests were set."""

from __future__ import annotations

import json
import time

_TEXT = "[" + "1," * 200_000 + "1]"
_SECONDS = 0.008  # CPU time of the computation on that machine


def slowness() -> float:
    """Return a factor for CPU-time bounds, at least 1: the slowest of five runs of a fixed computation."""
    return max(1.0, max(_once() for _ in range(5)) / _SECONDS)


def _once() -> float:
    begun = time.process_time()
    json.loads(_TEXT)
    return time.process_time() - begun
