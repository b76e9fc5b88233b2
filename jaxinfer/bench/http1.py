"""HTTP/1.1 client for many concurrent streams.

A general-purpose client costs too much CPU time per token (httpx three times this one's, docs/benchmarks.md): this one
handles data in the event loop's callback, so that a token is timestamped before any other work.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

MAX_HEAD = 64 * 1024
IDLE_SECONDS = 2.0  # servers close idle connections, some after 5 s: one that may be closing is not reused


class HttpError(Exception):
    """An invalid or incomplete HTTP response."""


class ResponseParser:
    """Incremental parser of one response: `feed` takes bytes as they arrive and returns the body bytes among them."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.done = False
        self._buffer, self._at = b"", 0
        self._left: int | None = None  # bytes until the body or chunk ends; None: until the connection closes
        self._read: Callable[[list[bytes]], bool] = self._head

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can be reused; known when `done`."""
        return self._left is not None and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """Parse more bytes and return those of the body.

        Raises:
            HttpError: the response is not HTTP.
        """
        self._buffer = self._buffer + data if self._buffer else data
        self._at = 0
        body: list[bytes] = []
        while not self.done and self._read(body):
            pass
        self._buffer = self._buffer[self._at :]
        return body[0] if len(body) == 1 else b"".join(body)

    def end(self) -> None:
        """Handle the end of the connection.

        Raises:
            HttpError: the response is incomplete.
        """
        if not self.done and (self._read != self._body or self._left is not None):
            if self._read == self._head and self._buffer:
                _status(self._buffer.decode("latin-1"))
            raise HttpError("the connection ended before the response")
        self.done = True

    def _until(self, mark: bytes) -> bytes | None:
        """Consume and return the bytes before ``mark``, and skip the mark; None while it has not arrived."""
        end = self._buffer.find(mark, self._at)
        if end < 0:
            if len(self._buffer) - self._at > MAX_HEAD:
                raise HttpError("a head or a line has no end")
            return None
        found, self._at = self._buffer[self._at : end], end + len(mark)
        return found

    def _take(self, most: int | None, body: list[bytes]) -> int:
        """Move bytes to the body; return their number."""
        end = len(self._buffer) if most is None else min(len(self._buffer), self._at + most)
        if taken := end - self._at:
            body.append(self._buffer[self._at : end])
            self._at = end
        return taken

    def _head(self, body: list[bytes]) -> bool:
        head = self._until(b"\r\n\r\n")
        if head is None:
            return False
        status, *lines = head.decode("latin-1").split("\r\n")
        code = _status(status)
        if code >= 200:  # informational responses precede the final one
            pairs = (line.partition(":")[::2] for line in lines)
            self.headers = {name.strip().lower(): value.strip() for name, value in pairs}
            self.status = code
            self._framing()
        return True

    def _framing(self) -> None:
        if self.headers.get("transfer-encoding", "").lower().endswith("chunked"):
            self._left, self._read = 0, self._size
            return
        length = self.headers.get("content-length")
        self._left, self._read = None if length is None else _number(length, 10), self._body
        self.done = self._left == 0 or self.status in (204, 304)

    def _body(self, body: list[bytes]) -> bool:
        taken = self._take(self._left, body)
        if self._left is not None:
            self._left -= taken
            self.done = not self._left
        return False

    def _size(self, body: list[bytes]) -> bool:
        line = self._until(b"\r\n")
        if line is None:
            return False
        self._left = _number(line.partition(b";")[0].decode("latin-1"), 16)
        self._read = self._chunk if self._left else self._trailer
        return True

    def _chunk(self, body: list[bytes]) -> bool:
        """Pass on the bytes of an incomplete chunk; skip the line end after the chunk."""
        assert self._left is not None
        self._left -= self._take(self._left, body)
        if self._left or len(self._buffer) - self._at < 2:
            return False
        if not self._buffer.startswith(b"\r\n", self._at):
            raise HttpError("a chunk is longer than it says")
        self._at, self._read = self._at + 2, self._size
        return True

    def _trailer(self, body: list[bytes]) -> bool:
        line = self._until(b"\r\n")
        self.done = line == b""
        return line is not None


def _status(line: str) -> int:
    words = line.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise HttpError(f"{line[:80]!r} is not how an HTTP/1.1 response begins")
    return int(words[1])


def _number(text: str, base: int) -> int:
    digits = text.strip()
    if not digits.isalnum():
        raise HttpError(f"{text[:40]!r} is no length")
    try:
        return int(digits, base)
    except ValueError as cause:
        raise HttpError(f"{text[:40]!r} is no length") from cause


class Exchange:
    """A request whose response is being received."""

    def __init__(self, on_body: Callable[[int, bytes], None]) -> None:
        self.parser = ResponseParser()
        self.on_body = on_body
        self.ended: asyncio.Future[ResponseParser] = asyncio.get_running_loop().create_future()

    def fail(self, cause: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(cause)


class Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, message: bytes, exchange: Exchange) -> None:
        assert self._transport is not None
        self._exchange = exchange
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # unsolicited data: the connection cannot be trusted
            self.close()
            return
        try:
            body = exchange.parser.feed(data)
        except HttpError as cause:
            self._fail(cause)
            return
        if body:
            exchange.on_body(exchange.parser.status or 0, body)
        if exchange.parser.done:
            self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        self._exchange = None
        if not exchange.parser.keeps_alive:
            self.close()
        if not exchange.ended.done():
            exchange.ended.set_result(exchange.parser)

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self._transport = self._exchange, None
        if exchange is None:
            return
        try:
            exchange.parser.end()
        except HttpError as cause:
            exchange.fail(cause if exc is None else exc)
        else:
            self._finish(exchange)

    def _fail(self, cause: Exception) -> None:
        if self._exchange is not None:
            self._exchange.fail(cause)
            self._exchange = None
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Pool:
    """Connection pool of one server: an exchange takes a free connection, or a new one."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, connect_timeout: float) -> None:
        self._address, self._tls, self._timeout = (host, port), tls, connect_timeout
        self._free: list[tuple[float, Connection]] = []  # with the time since which each is free
        self._all: set[Connection] = set()

    async def exchange(self, message: bytes, on_body: Callable[[int, bytes], None]) -> ResponseParser:
        """Send ``message`` and wait for the complete response; ``on_body`` gets status and body bytes as they arrive.

        Raises:
            OSError: connection failed, or was lost.
            TimeoutError: the connection was not established in time.
            HttpError: the response is not HTTP, or incomplete.
        """
        connection = self._reuse() or await self._connect()
        exchange = Exchange(on_body)
        try:
            connection.begin(message, exchange)
            parser = await exchange.ended
        except BaseException:
            self._drop(connection)
            raise
        if connection.usable:
            self._free.append((asyncio.get_running_loop().time(), connection))
        else:
            self._drop(connection)
        return parser

    def _reuse(self) -> Connection | None:
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while self._free:
            since, connection = self._free.pop()
            if connection.usable and since > oldest:
                return connection
            self._drop(connection)
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout):
            _, connection = await loop.create_connection(Connection, *self._address, ssl=self._tls)
        self._all.add(connection)
        return connection

    def _drop(self, connection: Connection) -> None:
        self._all.discard(connection)
        connection.close()

    def close(self) -> None:
        for connection in list(self._all):
            self._drop(connection)
        self._free.clear()
