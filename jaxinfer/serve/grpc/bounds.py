"""Limits on the calls and memory that gRPC clients can use, most of all clients without an API key.

A message in transfer uses server memory: gRPC allocates the whole message as soon as it is read. So only a few messages
are read at a time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol, runtime_checkable

from google.protobuf.message import Message

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.grpc.auth import OPEN, Caller
from jaxinfer.serve.grpc.connections import Connections, address_of

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
        self._most, self._count = most, 0
        self._calls: dict[str, dict[Call, None]] = {}

    def __len__(self) -> int:
        return self._count

    @contextlib.contextmanager
    def joined(self, call: Call) -> Iterator[None]:
        address = address_of(call.peer())
        self._calls.setdefault(address, {})[call] = None
        self._count += 1
        try:
            if self._count > self._most:
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
        if call in calls:
            self._count -= 1
            del calls[call]
            if not calls:
                del self._calls[address]


class Turns:
    """Fair queue in which a few calls without an API key may read at a time, round-robin between the addresses of
    waiting calls. A call that takes long while other calls wait is ended; data that has arrived is read within a few
    loop turns."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._ticks: dict[Call, int] = {}  # per call that has its turn: ticks during which other calls waited
        self._waiting: dict[str, collections.deque[asyncio.Future[None]]] = {}
        self._ticking = False

    @contextlib.asynccontextmanager
    async def taken(self, call: Call) -> AsyncIterator[None]:
        if self._free and not self._waiting:
            self._free -= 1
        else:
            await self._turn(address_of(call.peer()))
        self._ticks[call] = 0
        try:
            yield
        finally:
            del self._ticks[call]
            self._pass_on()

    async def _turn(self, address: str) -> None:
        ready = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(address, collections.deque()).append(ready)
        if not self._ticking:
            self._tick()
        try:
            await ready
        except asyncio.CancelledError:
            if not ready.cancelled():  # the turn was granted at the same time
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        self._free += 1
        while self._free and self._waiting:
            address = next(iter(self._waiting))
            turns = self._waiting.pop(address)
            ready = turns.popleft()
            if turns:
                self._waiting[address] = turns
            if not ready.done():
                ready.set_result(None)
                self._free -= 1

    def _tick(self) -> None:
        self._ticking = bool(self._waiting)
        if not self._ticking:
            return
        for call in self._ticks:
            self._ticks[call] += 1
            if self._ticks[call] > _TICKS:
                reason = "others without a key wait, and the rest of this request has not come"
                call.cut(ServeError(Kind.QUEUE_FULL, reason, retry_after=_AGAIN_SECONDS))
        asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)


class _Places:
    """FIFO queue for one client's slots for messages in transfer."""

    def __init__(self, most: int) -> None:
        self.users, self._most = 0, most
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def read(self, call: Call) -> Message:
        """Read a call's request when a slot is free."""
        self.users += 1
        if self.users > self._most:
            await self._place()
        try:
            return await call.only()
        finally:
            self._leave()

    async def _place(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self.users -= 1
            else:  # the slot was granted at the same time
                self._leave()
            raise

    def _leave(self) -> None:
        self.users -= 1
        while self._waiting:
            if not (place := self._waiting.popleft()).done():
                place.set_result(None)
                return


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
