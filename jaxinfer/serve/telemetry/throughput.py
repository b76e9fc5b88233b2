"""Throughput log: a line for each ten seconds in which the engine worked. No jax."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.serve.api.errors import ServeError

SECONDS = 10.0
"""Seconds between two samples."""

_log = logging.getLogger("jaxinfer.serve.telemetry.throughput")


@runtime_checkable
class Engine(Protocol):
    """A source of engine statistics."""

    async def stats(self) -> EngineStats:
        """Return the statistics. Raises `ServeError` if the engine does not run."""
        ...


class Throughput:
    """A periodic log of the engine's throughput, with vLLM's statistics. Idle intervals are not logged.

    Args:
        seconds: seconds between two samples.
        clock: clock in seconds.
    """

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._before: EngineStats | None = None
        self._at = clock()

    async def run(self, engine: Callable[[], Engine | None]) -> None:
        """Sample periodically until cancelled; ``engine`` returns None while there is none."""
        while True:
            await asyncio.sleep(self._seconds)
            if (found := engine()) is not None:
                await self.look(found)
            else:  # the rates exclude a start
                self._at = self._clock()

    async def look(self, engine: Engine) -> None:
        """Log the throughput since the last sample, if the engine ran a step."""
        try:
            stats = await engine.stats()
        except ServeError:  # after its restart the engine counts from 0
            self._before, self._at = None, self._clock()
            return
        now = self._clock()
        before, seconds = self._before, now - self._at
        self._before, self._at = stats, now
        if before is not None and stats.steps < before.steps:
            before = None
        if stats.steps > (0 if before is None else before.steps):
            _log.info("throughput", extra=figures(before, stats, seconds))


def figures(before: EngineStats | None, now: EngineStats, seconds: float) -> dict[str, float]:
    """Return rates between two samples (``before`` None: since the start) and the state at the second."""

    def since(name: str) -> int:
        return getattr(now, name) - (0 if before is None else getattr(before, name))

    queries = since("prefix_queries")
    found: dict[str, float] = {
        "prompt_tokens_per_second": round(since("prompt_tokens") / seconds, 1),
        "generated_tokens_per_second": round(since("generated_tokens") / seconds, 1),
        "running": now.running,
        "waiting": sum(now.waiting.values()),
    }
    if now.kv is not None:
        found["kv_cache_usage"] = round(now.kv.held / now.kv.total, 3) if now.kv.total else 0.0
    return found | {"prefix_cache_hit_rate": round(since("prefix_hits") / queries, 3) if queries else 0.0}
