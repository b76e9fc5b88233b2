"""Messages between the processes of a group: framed, bounded, and authenticated by a shared key. No jax, no pickle."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

MAX_HEADER = 1 << 20
MAX_BODY = 1 << 28
"""Largest bytes of a frame's JSON and of its arrays: a peer that announces more is cut off before allocation."""

HANDSHAKE_SECONDS = 5.0

_SIZES = struct.Struct("!II")
_GREETING = b"jaxinfer group 1\n"
_SMALL = 1 << 16  # bytes up to which a frame is sent in one call
_NONCE = 32
_TAG = 32
# Dtypes in the calls of an executor. Anything else is rejected, objects above all.
_DTYPES = {np.dtype(kind).name: np.dtype(kind) for kind in ("bool", "uint8", "int32", "int64", "uint32", "float32")}


class ChannelError(Exception):
    """A broken connection: closed, cut within a frame, or with malformed data. The message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """A message: its kind, plain values (JSON), and arrays of bool, uint8, int32, int64, uint32 or float32."""

    kind: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: tuple[np.ndarray, ...] = ()

    def parts(self) -> list[bytes | memoryview]:
        """Encode the frame as buffers that are sent one after another.

        Raises:
            ValueError: the frame is too large, or an array has another dtype.
        """
        arrays = [np.ascontiguousarray(array) for array in self.arrays]
        if unknown := {array.dtype.name for array in arrays} - set(_DTYPES):
            raise ValueError(f"a frame holds no arrays of {', '.join(sorted(unknown))}")
        described = [[array.dtype.name, array.shape] for array in self.arrays]
        header = json.dumps([self.kind, dict(self.values), described], separators=(",", ":")).encode()
        size = sum(array.nbytes for array in arrays)
        if len(header) > MAX_HEADER or size > MAX_BODY:
            raise ValueError(f"a frame of {len(header)} + {size} bytes is beyond {MAX_HEADER} + {MAX_BODY}")
        return [_SIZES.pack(len(header), size) + header, *(array.reshape(-1).view(np.uint8).data for array in arrays)]


def _parsed(header: bytes, body: bytearray) -> Frame:
    try:
        kind, values, described = json.loads(header)
        arrays, at = [], 0
        for name, shape in described:
            dtype, count = _DTYPES[name], math.prod(shape)
            arrays.append(np.frombuffer(body, dtype, count, at).reshape(shape))
            at += count * dtype.itemsize
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ChannelError(f"it sent what is no frame: {error!r}") from error
    if at != len(body) or not (isinstance(kind, str) and isinstance(values, dict)):
        raise ChannelError("it sent what is no frame")
    return Frame(kind, values, tuple(arrays))


class Channel:
    """Frames over a connected socket. One thread may receive; any number may send."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._sending = connected, threading.Lock()
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frame: Frame) -> None:
        """Send a frame. Returns when the OS has buffered it, after the peer has read most of the earlier frames.

        Raises:
            ChannelError: the connection is over.
            ValueError: see `Frame.parts`.
        """
        parts = frame.parts()
        if sum(map(len, parts)) <= _SMALL:
            parts = [b"".join(parts)]
        with self._sending:
            try:
                for part in parts:
                    self._socket.sendall(part)
            except OSError as error:
                raise ChannelError(f"the connection is broken: {error}") from error

    def receive(self) -> Frame:
        """Wait for the next frame and return it.

        Raises:
            ChannelError: the connection is over.
        """
        header, body = _SIZES.unpack(_exactly(self._socket, _SIZES.size))
        if header > MAX_HEADER or body > MAX_BODY:
            raise ChannelError(f"it sent a frame of {header} + {body} bytes, beyond {MAX_HEADER} + {MAX_BODY}")
        return _parsed(bytes(_exactly(self._socket, header)), _exactly(self._socket, body))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _exactly(connected: socket.socket, count: int, deadline: float | None = None) -> bytearray:
    """Read ``count`` bytes; ``deadline`` on the monotonic clock bounds the whole read, however slowly bytes arrive."""
    found = bytearray(count)
    view, at = memoryview(found), 0
    while at < count:
        try:
            if deadline is not None:
                connected.settimeout(max(deadline - time.monotonic(), 1e-3))
            got = connected.recv_into(view[at:])
        except OSError as error:
            raise ChannelError(f"the connection is broken: {error}") from error
        if not got:
            raise ChannelError("the connection was cut within a frame" if at else "the connection was closed")
        at += got
    return found


# ---- authentication


def greet(connected: socket.socket, key: bytes) -> Channel:
    """Authenticate an accepted connection: prove knowledge of the key after the caller has. Closes it on failure.

    Both sides answer a challenge with HMAC-SHA256 over both nonces; the key itself is never sent. Later frames are
    neither signed nor encrypted.

    Raises:
        ChannelError: the caller does not know the key, or is not done within `HANDSHAKE_SECONDS`.
    """
    deadline, mine = time.monotonic() + HANDSHAKE_SECONDS, secrets.token_bytes(_NONCE)
    with _closed_on_error(connected):
        connected.settimeout(HANDSHAKE_SECONDS)
        _write(connected, [_GREETING, mine])
        answer = bytes(_exactly(connected, _NONCE + _TAG, deadline))
        theirs, tag = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(tag, _tag(key, b"caller", mine, theirs)):
            raise ChannelError("it does not know the group's key")
        _write(connected, [_tag(key, b"called", mine, theirs)])
        return Channel(connected)


def call(connected: socket.socket, key: bytes) -> Channel:
    """Authenticate a connection on the calling side; see `greet`.

    Raises:
        ChannelError: see `greet`.
    """
    deadline, mine = time.monotonic() + HANDSHAKE_SECONDS, secrets.token_bytes(_NONCE)
    with _closed_on_error(connected):
        connected.settimeout(HANDSHAKE_SECONDS)
        greeting = bytes(_exactly(connected, len(_GREETING) + _NONCE, deadline))
        if not greeting.startswith(_GREETING):
            raise ChannelError("what listens there is no process of a group")
        theirs = greeting[len(_GREETING) :]
        _write(connected, [mine, _tag(key, b"caller", theirs, mine)])
        tag = bytes(_exactly(connected, _TAG, deadline))
        if not hmac.compare_digest(tag, _tag(key, b"called", theirs, mine)):
            raise ChannelError("it does not know the group's key")
        return Channel(connected)


def _tag(key: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, b"".join((_GREETING, role, *nonces)), "sha256")


def _write(connected: socket.socket, parts: Iterable[bytes]) -> None:
    try:
        connected.sendall(b"".join(parts))
    except OSError as error:
        raise ChannelError(f"the connection is broken: {error}") from error


@contextlib.contextmanager
def _closed_on_error(connected: socket.socket) -> Any:
    try:
        yield
    except ChannelError:
        connected.close()
        raise
