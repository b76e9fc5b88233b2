"""A line of the log for each ten seconds in which the engine worked. No jax."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.serve.errors import ServeError

SECONDS = 10.0
"""Seconds between two looks."""

_log = logging.getLogger("jaxinfer.serve.throughput")


@runtime_checkable
class Engine(Protocol):
    """Whoever knows the engine's figures."""

    async def stats(self) -> EngineStats:
        """Raises `ServeError`: it does not run."""
        ...


class Throughput:
    """Logs what the engine did between two looks, with vLLM's figures. Where it did nothing, nothing is logged.

    Args:
        seconds: between two looks.
        clock: in seconds.
    """

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._before: EngineStats | None = None
        self._at = clock()

    async def run(self, engine: Callable[[], Engine | None]) -> None:
        """Look again and again, until cancelled; ``engine`` gives None while there is none."""
        while True:
            await asyncio.sleep(self._seconds)
            if (found := engine()) is not None:
                await self.look(found)
            else:  # a start takes no part in the rates
                self._at = self._clock()

    async def look(self, engine: Engine) -> None:
        """Log what was done since the last look, if anything was."""
        try:
            stats = await engine.stats()
        except ServeError:  # it is started again, and counts from 0 then
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
    """Rates between two looks, ``before`` being the start where it is None, and the state at the second one."""

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
