"""A load through an engine that is asked step by step. Runs without numpy or JAX."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from benchmarks.gpu_peers.loads import Load
from benchmarks.gpu_peers.timeline import Timeline


class Stepped(Protocol):
    """An engine with continuous batching: greedy, end-of-sequence tokens end nothing."""

    def add(self, request: int, prompt: Sequence[int], output: int) -> None: ...

    def step(self) -> Iterable[tuple[int, int]]:
        """Requests and how many new tokens each has."""
        ...

    @property
    def has_work(self) -> bool: ...


def drive(engine: Stepped, load: Load, prompts: Sequence[Sequence[int]], due: Sequence[float]) -> dict[str, Any]:
    """Figures of a load. A request enters between two steps, when it is due.

    Raises:
        RuntimeError: a request got another number of tokens than it asked for.
    """
    timeline = Timeline(due)
    waiting = deque(enumerate(due))
    timeline.start()
    while waiting or engine.has_work:
        while waiting and waiting[0][1] <= timeline.now():
            at, _ = waiting.popleft()
            engine.add(at, prompts[at], load.output)
        if not engine.has_work:
            time.sleep(max(0.0, waiting[0][1] - timeline.now()))
            continue
        for at, tokens in engine.step():
            timeline.add(at, tokens)
    return timeline.figures(load.output)
