"""Event loop of a server process, which measures how long it was blocked. No jax."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import selectors
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, override

LONG_HOLD_SECONDS = 0.02
"""Seconds above which a hold of the loop is counted: no single request may block the loop that long."""
INLINE = 1000
"""Characters, token ids or items that are processed in the event loop, about 0.5 ms; longer inputs go to a thread."""
_SWITCH_SECONDS = 0.0005
_MANY = 512
_BEAT_SECONDS = 0.1  # costs 0.2 ms of CPU time each
_NOTED_SECONDS = 0.001  # about one token: shorter holds cost only the two clock reads
_MINUTE = 60.0


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on a `Loop` (as `asyncio.run`), for a process with compute threads.

    By default Python lets such a thread hold the GIL for 5 ms, which would delay tokens and rejections while the engine
    plans a step or another prompt is tokenized. Here the switch interval is 0.5 ms.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    return asyncio.run(main, loop_factory=Loop)


async def off_loop[*A, T](
    work: int, function: Callable[[*A], T], *args: *A, threads: concurrent.futures.Executor | None = None
) -> T:
    """Return ``function(*args)``, run in one of ``threads`` (None: the loop's) if ``work`` exceeds `INLINE`."""
    if work <= INLINE:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(threads, function, *args)


class Loop(asyncio.SelectorEventLoop):
    """An asyncio event loop that measures how long it was blocked and coalesces the wake-ups of grpc.aio.

    For each completed operation, a thread of grpc.aio writes one byte to a socket; its reader takes one byte and then
    handles all completed operations. The remaining bytes would wake the loop again for nothing. If grpc.aio is
    implemented in another way, this is the standard loop.

    Attributes:
        holds: statistics of the times in which the loop did not poll for events.
    """

    def __init__(self) -> None:
        self.holds = Holds()
        super().__init__(_Watched(self.holds))
        self.call_later(_BEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        """Schedule the next beat. It bounds the wait of the selector, which reveals a thread that holds the GIL."""
        self.call_later(_BEAT_SECONDS, self._beat)

    @override
    def add_reader[*A](self, fd: Any, callback: Callable[[*A], Any], *args: *A) -> None:
        owner = getattr(getattr(callback, "func", None), "__self__", None)
        if type(owner).__name__ == "PollerCompletionQueue" and isinstance(fd, socket.socket):
            super().add_reader(fd, self._woken, fd, functools.partial(callback, *args))
        else:
            super().add_reader(fd, callback, *args)

    def _woken(self, wakes: socket.socket, handle: Callable[[], Any]) -> None:
        """Read all wake-up bytes except one, which ``handle`` reads: it handles every completed operation."""
        try:
            waiting = len(wakes.recv(_MANY, socket.MSG_PEEK))
            if waiting > 1:
                wakes.recv(waiting - 1)  # ``handle`` reads one
        except BlockingIOError:  # another loop has read them
            pass
        handle()


class Holds:
    """Statistics of loop holds: the times between two polls for events, in which no other task starts.

    Attributes:
        long: number of holds longer than `LONG_HOLD_SECONDS`.
    """

    def __init__(self) -> None:
        self.long = 0
        self._worst = self._before = self._since = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Record a hold that has ended."""
        if now - self._since > _MINUTE:
            self._before = self._worst if now - self._since < 2 * _MINUTE else 0.0
            self._worst, self._since = 0.0, now
        self._worst = max(self._worst, seconds)
        self.long += seconds > LONG_HOLD_SECONDS

    def longest(self) -> float:
        """Return the longest hold of the last one to two minutes, in seconds: a reader once a minute misses none."""
        return max(self._worst, self._before)


class _Watched(selectors.DefaultSelector):
    """A selector that measures each round of the loop with two clock reads."""

    def __init__(self, holds: Holds) -> None:
        super().__init__()
        self._holds, self._woke = holds, time.monotonic()

    @override
    def select(self, timeout: float | None = None) -> Any:
        start = _clock()
        if start - self._woke > _NOTED_SECONDS:
            self._holds.add(start - self._woke, start)
        found = _select(self, timeout)
        self._woke = woke = _clock()
        # The wait exceeded its timeout: the thread was kept from waking up.
        if not found and timeout is not None and woke - start - timeout > _NOTED_SECONDS:
            self._holds.add(woke - start - max(timeout, 0.0), woke)
        return found


_clock, _select = time.monotonic, selectors.DefaultSelector.select
