"""The event loop of a process that serves. No jax."""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any, override

_SWITCH_SECONDS = 0.0005
_MANY = 512


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a `Loop`, for a process that has threads which compute.

    Python lets such a thread keep the loop waiting for 5 ms each time: tokens and refusals would wait for an engine
    that plans a step, or for the tokens of somebody else's prompt. Here it is half a millisecond.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    return asyncio.run(main, loop_factory=Loop)


class Loop(asyncio.SelectorEventLoop):
    """asyncio's own, but that grpc.aio wakes it once where much has happened.

    For each operation that ends, a thread of grpc.aio writes a byte into a socket; its reader takes one byte, and then
    care of all operations that have ended. The bytes that are left wake the loop as often again, for nothing. Where
    grpc.aio does it in another way, this is asyncio's loop and nothing else.
    """

    @override
    def add_reader[*A](self, fd: Any, callback: Callable[[*A], Any], *args: *A) -> None:
        owner = getattr(getattr(callback, "func", None), "__self__", None)
        if type(owner).__name__ == "PollerCompletionQueue" and isinstance(fd, socket.socket):
            super().add_reader(fd, self._woken, fd, functools.partial(callback, *args))
        else:
            super().add_reader(fd, callback, *args)

    def _woken(self, wakes: socket.socket, handle: Callable[[], Any]) -> None:
        """What is taken here was written when its operation had ended, of which ``handle`` takes care: none is lost."""
        try:
            there = len(wakes.recv(_MANY, socket.MSG_PEEK))
            if there > 1:
                wakes.recv(there - 1)  # ``handle`` wants one
        except BlockingIOError:  # another loop was faster
            pass
        handle()
