"""Attention shapes that both peers compute, and a peer's timing loop. Runs on Python 3.11, without jax and torch."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

LAYERS = 8
"""Attention calls that are chained on each other's output, so that program launch time is not measured."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Attention shape: the query and KV lengths of a batch.

    Attributes:
        queries: queries of each sequence: 1 is decoding, more is a prompt chunk at the end of its keys.
        lengths: KV length of each sequence, its queries included.
    """

    name: str
    queries: int
    lengths: tuple[int, ...]
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 64

    @classmethod
    def of(cls, request: dict[str, Any]) -> Shape:
        return cls(**{**request, "lengths": tuple(request["lengths"])})


def timed(call: Callable[[], Any], seconds: float) -> list[float]:
    """Return the seconds of each call, for as many calls as fit (at least three), after two warm-up calls."""
    call(), call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def serve(versions: dict[str, str], prepare: Callable[[Shape, str], Callable[[], Any]]) -> None:
    """Answer requests, one JSON object a line: a shape, a dtype and the seconds to spend; the reply is a median."""
    prepared: dict[str, Callable[[], Any]] = {}
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        key = json.dumps([request["shape"], request["dtype"]])
        if key not in prepared:
            prepared[key] = prepare(Shape.of(request["shape"]), request["dtype"])
        times = timed(prepared[key], request["seconds"])
        print(json.dumps({"median": statistics.median(times) / LAYERS, "calls": len(times)}), flush=True)
