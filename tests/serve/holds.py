"""How long a loop is held, measured so that a busy machine does not matter: in processor time, not in time.

A beat comes round in the loop every few milliseconds. What the process computed between two of them, in whichever of
its threads, is at least what kept the loop: its own work, or that of a thread that did not let go of the interpreter.
What other processes compute is not in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from tests.serve.live import Live

BEAT = 0.002


class Holds:
    """The longest ones since `measuring` began, in seconds.

    Attributes:
        process: processor time of all threads between two beats.
        loop: of the loop's own thread.
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
    """Of a server in a thread of this process."""
    holds = Holds()
    _wait(live, lambda: holds.beat(live.loop))
    yield holds
    _wait(live, holds.stop)


def _wait(live: Live, function: object) -> None:
    async def call() -> None:
        function()  # type: ignore[operator]

    asyncio.run_coroutine_threadsafe(call(), live.loop).result(120)
