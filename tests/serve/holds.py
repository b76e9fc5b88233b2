"""Measurement of event loop stalls in CPU time instead of wall time, so that a busy machine does not matter.

The loop runs a beat every few milliseconds. The CPU time of all threads of the process between two beats bounds the
stall from above: the loop's own work, or that of a thread that holds the GIL. Other processes do not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from tests.serve.live import Live

BEAT = 0.002


class Holds:
    """Longest stalls since `measuring` began, in seconds.

    Attributes:
        process: CPU time of all threads between two beats.
        loop: CPU time of the loop's own thread.
    """

    def __init__(self) -> None:
        self.process = self.loop = 0.0
        self._before: tuple[float, float] | None = None
        self._handle: asyncio.TimerHandle | None = None

    def beat(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.process_time(), time.thread_time()
        if self._before is not None:
            self.process = max(self.process, now[0] - self._before[0])
            self.loop = max(self.loop, now[1] - self._before[1])
        self._before = now
        self._handle = loop.call_later(BEAT, self.beat, loop)

    def stop(self) -> None:
        assert self._handle is not None
        self._handle.cancel()


@contextlib.contextmanager
def measuring(live: Live) -> Iterator[Holds]:
    """Measure a server in a thread of this process."""
    holds = Holds()
    _wait(live, lambda: holds.beat(live.loop))
    yield holds
    _wait(live, holds.stop)


def _wait(live: Live, function: object) -> None:
    async def call() -> None:
        function()  # type: ignore[operator]

    asyncio.run_coroutine_threadsafe(call(), live.loop).result(120)
