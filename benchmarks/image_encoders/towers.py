"""Vision towers that both peers compute, and a peer's timing loop. Runs on Python 3.11, without jax and torch."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.attention.shapes import timed

Grid = tuple[int, int, int]

TOWERS: dict[str, dict[str, Any]] = {
    "tiny": {"depth": 2, "embed_dim": 96, "num_heads": 4, "hidden_size": 128},
    "100M": {"depth": 13, "embed_dim": 768, "num_heads": 12, "hidden_size": 1536},
}
"""Fields of the ``vision_config`` of a Qwen2-VL, by name."""
GRIDS: dict[str, Grid] = {"224 x 224": (1, 16, 16), "448 x 448": (1, 32, 32), "616 x 896": (1, 44, 64)}
"""Patches of an image, by its size in pixels."""
VALUES = 3 * 2 * 14 * 14
"""Values of a patch."""


def serve(versions: dict[str, str], prepare: Callable[[str, Grid, str], Callable[[], Any]]) -> None:
    """Answer requests, one JSON object a line: tower, grid, dtype and the seconds to spend. The reply is a median."""
    prepared: dict[str, Callable[[], Any]] = {}
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        key = json.dumps([request["tower"], request["grid"], request["dtype"]])
        if key not in prepared:
            prepared[key] = prepare(request["tower"], tuple(request["grid"]), request["dtype"])
        times = timed(prepared[key], request["seconds"])
        print(json.dumps({"median": statistics.median(times), "calls": len(times)}), flush=True)
