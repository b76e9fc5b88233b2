"""How slow this machine is at the moment, beside the one on which the bounds of processor time in tests were set."""

from __future__ import annotations

import json
import time

_TEXT = "[" + "1," * 200_000 + "1]"
_SECONDS = 0.008  # what it takes there


def slowness() -> float:
    """A factor for bounds of processor time, 1 or more: a fixed computation's, the slowest of a few."""
    return max(1.0, max(_once() for _ in range(5)) / _SECONDS)


def _once() -> float:
    begun = time.process_time()
    json.loads(_TEXT)
    return time.process_time() - begun
