"""Load driver for an engine that is stepped by the caller. Runs without numpy or JAX."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from benchmarks.gpu_peers.loads import Load
from benchmarks.gpu_peers.timeline import Timeline


class Stepped(Protocol):
    """An engine with continuous batching: greedy decoding, EOS ignored."""

    def add(self, request: int, prompt: Sequence[int], output: int) -> None: ...

    def step(self) -> Iterable[tuple[int, int]]:
        """Run a step; return request numbers and the number of new tokens of each."""
        ...

    @property
    def has_work(self) -> bool: ...


def drive(engine: Stepped, load: Load, prompts: Sequence[Sequence[int]], due: Sequence[float]) -> dict[str, Any]:
    """Run a load and return its figures. A request is added between two steps, when it is due.

    Raises:
        RuntimeError: a request got a wrong number of tokens.
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
