"""An HTTP/2 frame client for input that no library sends: partial messages, silence, floods."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW = 4
"""Identifier of the HTTP/2 setting."""

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MAX_FRAME = 16384


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """Return an HTTP/2 frame."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def headers(path: str, *more: tuple[str, str]) -> bytes:
    """Return the headers of a gRPC call, every field a literal without indexing (RFC 7541, 6.2.2)."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def prefix(size: int) -> bytes:
    """Return the prefix of a gRPC message of ``size`` bytes."""
    return b"\0" + size.to_bytes(4)


class Wire:
    """A connection that sends raw frames within the server's flow-control windows.

    Attributes:
        ended: streams that the server has ended.
        closed: set when the server has closed the connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._next, self._initial = 1, 65535
        self._windows = {0: 65535}
        self._changed = asyncio.Event()
        self.ended: set[int] = set()
        self.closed = asyncio.Event()

    @classmethod
    async def connect(cls, port: int) -> Self:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self = cls(reader, writer)
        writer.write(_GREETING + frame(SETTINGS))
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        self._writer.transport.abort()

    def open(self, path: str, *metadata: tuple[str, str]) -> int:
        """Begin a call; return its stream id."""
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        self._writer.write(frame(HEADERS, headers(path, *metadata), END_HEADERS, stream))
        return stream

    def write(self, data: bytes) -> None:
        """Write frames unchanged."""
        self._writer.write(data)

    async def send(self, stream: int, data: bytes, *, end: bool = False) -> int:
        """Send until all is sent or the server has ended the stream; return the number of bytes sent."""
        at = 0
        while at < len(data) and stream not in self.ended and not self.closed.is_set():
            room = min(self._windows[0], self._windows[stream], _MAX_FRAME, len(data) - at)
            if room <= 0:
                await self.change()
                continue
            flags = END_STREAM if end and at + room == len(data) else 0
            self._writer.write(frame(DATA, data[at : at + room], flags, stream))
            at += room
            self._windows[0] -= room
            self._windows[stream] -= room
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
        return at

    async def until_ended(self, *streams: int) -> None:
        """Wait until the server has ended all of these streams."""
        while not self.ended.issuperset(streams):
            assert not self.closed.is_set(), "the connection is closed"
            await self.change()

    async def change(self) -> None:
        """Wait for the next frame of the server."""
        changed = self._changed
        await changed.wait()

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
                self._take(head[3], head[4], int.from_bytes(head[5:]) & 0x7FFFFFFF, payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
            self._wake()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, self._initial) + int.from_bytes(payload)
        elif kind == SETTINGS and not flags & ACK:
            self._set(payload)
        elif kind == PING and not flags & ACK:
            self._writer.write(frame(PING, payload, ACK))
        elif kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self.ended.add(stream)
        self._wake()

    def _set(self, payload: bytes) -> None:
        entries = [payload[at : at + 6] for at in range(0, len(payload), 6)]
        settings = {int.from_bytes(entry[:2]): int.from_bytes(entry[2:]) for entry in entries}
        if (window := settings.get(INITIAL_WINDOW)) is not None:
            for stream in self._windows.keys() - {0}:
                self._windows[stream] += window - self._initial
            self._initial = window
        self._writer.write(frame(SETTINGS, flags=ACK))

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _text(text: str) -> bytes:
    """Return an HPACK string: its length with a prefix of 7 bits (RFC 7541, 5.1), and the raw bytes."""
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    size, more = b"\x7f", len(data) - 127
    while more >= 128:
        size, more = size + bytes([more % 128 + 128]), more // 128
    return size + bytes([more]) + data
