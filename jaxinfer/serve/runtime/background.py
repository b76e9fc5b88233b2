"""Background tasks of a server: a task that fails is logged, counted and restarted. No jax."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Awaitable, Callable

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a failed task is restarted, doubled with each consecutive failure."""
STEADY_SECONDS = 60.0
"""Seconds of running after which a task counts as recovered."""
TOLERATED = 3
"""Consecutive failures that are tolerated; with one more the server is not ready."""

_log = logging.getLogger("jaxinfer.serve")


async def shielded[T](work: Awaitable[T]) -> T:
    """Await ``work``, which continues if the caller is cancelled. A later failure is not logged: with `asyncio.shield`
    alone, the event loop would report an exception that was never retrieved."""
    future = asyncio.ensure_future(work)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(future)


class Background:
    """The background tasks of one server, by name.

    Attributes:
        failures: number of failures of each task since the start.
    """

    def __init__(self, pause: float = FIRST_PAUSE) -> None:
        self._pause = pause
        self.failures = collections.Counter[str]()
        self._in_a_row = collections.Counter[str]()

    @property
    def broken(self) -> list[str]:
        """Names of the tasks with more than `TOLERATED` consecutive failures."""
        return [name for name, count in self._in_a_row.items() if count > TOLERATED]

    def start(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run ``work()`` until it returns or the task is cancelled; after a failure, run it again."""
        self.failures[name] += 0
        return asyncio.create_task(self._run(name, work), name=name)

    async def _run(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            start = time.monotonic()
            recovered = asyncio.get_running_loop().call_later(STEADY_SECONDS, self._in_a_row.pop, name, None)
            try:
                return await work()
            except Exception:  # noqa: BLE001 any failure: the task is restarted
                self.failures[name] += 1
                self._in_a_row[name] += 1
                pause = min(self._pause * 2 ** (self._in_a_row[name] - 1), LONGEST_PAUSE)
                after = time.monotonic() - start
                _log.exception("background task %r failed after %.1f s; it starts again in %.1f s", name, after, pause)
            finally:
                recovered.cancel()
            await asyncio.sleep(pause)
