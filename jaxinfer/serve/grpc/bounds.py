"""Limits on the calls and memory that gRPC clients can use, most of all clients without an API key.

A message in transfer uses server memory: gRPC allocates the whole message as soon as it is read. So only a few messages
are read at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol, runtime_checkable

from google.protobuf.message import Message

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.grpc.auth import OPEN, Caller
from jaxinfer.serve.grpc.connections import Connections, address_of
from jaxinfer.serve.runtime.fair_pool import FairPool

STRANGERS = 256
"""Maximum number of concurrent calls without an API key: health checks, most of which end at once."""
WAITING = 4096
"""Maximum number of queued calls of one client whose messages wait to be read."""
_FEW = 8
_AGAIN_SECONDS = 1.0
_TICK_SECONDS = 0.1
_TICKS = 3


@runtime_checkable
class Call(Protocol):
    """The subset of `jaxinfer.serve.grpc.rpc.Rpc` that is used here."""

    caller: Caller
    reading_since: float | None

    def peer(self) -> str: ...
    def cut(self, error: ServeError) -> None: ...
    async def only(self) -> Message: ...


class AnonymousCalls:
    """Calls without an API key. A call above ``most`` is not rejected, since it may be a probe: the oldest call of the
    address with the most calls is ended instead."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: dict[str, dict[Call, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    @contextlib.contextmanager
    def joined(self, call: Call) -> Iterator[None]:
        address = address_of(call.peer())
        self._calls.setdefault(address, {})[call] = None
        try:
            if len(self) > self._most:
                self._end_one()
            yield
        finally:
            self._leave(address, call)

    def _end_one(self) -> None:
        busiest = max(self._calls, key=lambda address: len(self._calls[address]))
        oldest = next(iter(self._calls[busiest]))
        self._leave(busiest, oldest)
        reason = f"{self._most} calls without a key are open, and this was the oldest of {busiest}"
        oldest.cut(ServeError(Kind.QUEUE_FULL, reason, retry_after=_AGAIN_SECONDS))

    def _leave(self, address: str, call: Call) -> None:
        """Remove a call; idempotent."""
        calls = self._calls.get(address, {})
        calls.pop(call, None)
        if not calls:
            self._calls.pop(address, None)


class Turns:
    """Fair queue in which a few calls without an API key may read at a time, round-robin between the addresses of
    waiting calls. A call that takes long while other calls wait is ended; data that has arrived is read within a few
    loop turns."""

    def __init__(self, most: int) -> None:
        self._most, self._turns = most, FairPool(range(most), most, sys.maxsize, "calls wait")
        self._ticks: dict[Call, int] = {}  # per call that has its turn: ticks during which other calls waited
        self._ticking = False

    @contextlib.asynccontextmanager
    async def taken(self, call: Call) -> AsyncIterator[None]:
        if self._turns.held == self._most and not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_soon(self._tick)  # when this call waits
        address = address_of(call.peer())
        turn = await self._turns.take(address)
        self._ticks[call] = 0
        try:
            yield
        finally:
            del self._ticks[call]
            self._turns.give(address, turn)

    def _tick(self) -> None:
        self._ticking = self._turns.waiting > 0
        if not self._ticking:
            return
        for call in self._ticks:
            self._ticks[call] += 1
            if self._ticks[call] > _TICKS:
                reason = "others without a key wait, and the rest of this request has not come"
                call.cut(ServeError(Kind.QUEUE_FULL, reason, retry_after=_AGAIN_SECONDS))
        asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)


class _Places:
    """FIFO queue for one client's slots for messages in transfer; ``users``: calls that have one or wait for it."""

    def __init__(self, most: int) -> None:
        self.users, self._slots = 0, asyncio.Semaphore(most)

    async def read(self, call: Call) -> Message:
        """Read a call's request when a slot is free."""
        self.users += 1
        try:
            async with self._slots:
                return await call.only()
        finally:
            self.users -= 1


class Bounds:
    """Limits of one server.

    Args:
        message_bytes: maximum bytes of one message.
        receive_bytes: bytes of a client's messages in transfer; half of it for all clients without a key together.
            At least eight messages are always allowed.
        connections: records the connection of each call.
    """

    def __init__(
        self, message_bytes: int = 1 << 24, receive_bytes: int = 1 << 28, connections: Connections | None = None
    ) -> None:
        messages = receive_bytes // message_bytes
        self._each = max(messages, _FEW)
        self._strangers, self._unread = AnonymousCalls(STRANGERS), Turns(max(messages // 2, _FEW))
        self._places: dict[str, _Places] = {}
        self._connections = connections or Connections({})

    async def held[T](self, call: Call, run: Callable[[], Awaitable[T]], *, stranger: bool) -> T:
        """Run an authorised call.

        Args:
            stranger: whether no API key was required.
        """
        peer = call.peer()
        connection = self._connections.begin(peer, known=not stranger)
        try:
            if not stranger:
                return await run()
            with self._strangers.joined(call):
                return await run()
        finally:
            self._connections.end(peer, connection, known=not stranger)

    async def received(self, call: Call, scope: str | None) -> Message:
        """Read the request of a unary-request call when its turn has come.

        Raises:
            ServeError: the request is missing or invalid, or too many calls of this client wait.
        """
        call.reading_since = time.monotonic()
        if scope is OPEN:
            async with self._unread.taken(call):
                return await call.only()
        client = call.caller.name or address_of(call.peer())
        places = self._places.get(client)
        if places is None:
            places = self._places[client] = _Places(self._each)
        elif places.users >= self._each + WAITING:
            reason = f"{WAITING} calls wait for the messages of {self._each} others of yours to come"
            raise ServeError(Kind.QUEUE_FULL, reason, retry_after=_AGAIN_SECONDS)
        try:
            return await places.read(call)
        finally:
            if not places.users and self._places.get(client) is places:
                del self._places[client]
