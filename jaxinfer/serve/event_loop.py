"""The event loop of a process that serves. No jax."""

from __future__ import annotations

import asyncio
import functools
import selectors
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, override

LONG_HOLD_SECONDS = 0.02
"""A hold that is longer is counted: no request alone may hold the loop for so long."""
_SWITCH_SECONDS = 0.0005
_MANY = 512
_BEAT_SECONDS = 0.1  # each costs 0.2 ms of the processor
_NOTED_SECONDS = 0.001  # a token or so: shorter ones cost nothing but the two looks at the clock
_MINUTE = 60.0


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a `Loop`, for a process that has threads which compute.

    Python lets such a thread keep the loop waiting for 5 ms each time: tokens and refusals would wait for an engine
    that plans a step, or for the tokens of somebody else's prompt. Here it is half a millisecond.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    return asyncio.run(main, loop_factory=Loop)


class Loop(asyncio.SelectorEventLoop):
    """asyncio's own, but that it knows how long it was held, and that grpc.aio wakes it once where much has happened.

    For each operation that ends, a thread of grpc.aio writes a byte into a socket; its reader takes one byte, and then
    care of all operations that have ended. The bytes that are left wake the loop as often again, for nothing. Where
    grpc.aio does it in another way, this is asyncio's loop and nothing else.

    Attributes:
        holds: how long nobody looked for what had come.
    """

    def __init__(self) -> None:
        self.holds = Holds()
        super().__init__(_Watched(self.holds))
        self.call_later(_BEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        """Bounds what the selector waits for: a thread that does not let go of the interpreter is noticed by it."""
        self.call_later(_BEAT_SECONDS, self._beat)

    @override
    def add_reader[*A](self, fd: Any, callback: Callable[[*A], Any], *args: *A) -> None:
        owner = getattr(getattr(callback, "func", None), "__self__", None)
        if type(owner).__name__ == "PollerCompletionQueue" and isinstance(fd, socket.socket):
            super().add_reader(fd, self._woken, fd, functools.partial(callback, *args))
        else:
            super().add_reader(fd, callback, *args)

    def _woken(self, wakes: socket.socket, handle: Callable[[], Any]) -> None:
        """Read all wake-ups but one, which ``handle`` reads: it looks after every operation that has ended."""
        try:
            waiting = len(wakes.recv(_MANY, socket.MSG_PEEK))
            if waiting > 1:
                wakes.recv(waiting - 1)  # ``handle`` wants one
        except BlockingIOError:  # another loop was faster
            pass
        handle()


class Holds:
    """The times between two looks at what has come: in these nobody else gets on.

    Attributes:
        long: how many were longer than `LONG_HOLD_SECONDS`.
    """

    def __init__(self) -> None:
        self.long = 0
        self._worst = self._before = self._since = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Note a hold that has ended."""
        if now - self._since > _MINUTE:
            self._before = self._worst if now - self._since < 2 * _MINUTE else 0.0
            self._worst, self._since = 0.0, now
        self._worst = max(self._worst, seconds)
        self.long += seconds > LONG_HOLD_SECONDS

    def longest(self) -> float:
        """The longest hold of the last one to two minutes, in seconds: whoever asks once a minute misses none."""
        return max(self._worst, self._before)


class _Watched(selectors.DefaultSelector):
    """Two looks at a clock for a round of the loop, in which it does whatever there is to do."""

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
        # It slept longer than it was told: something kept it from waking.
        if not found and timeout is not None and woke - start - timeout > _NOTED_SECONDS:
            self._holds.add(woke - start - max(timeout, 0.0), woke)
        return found


_clock, _select = time.monotonic, selectors.DefaultSelector.select
