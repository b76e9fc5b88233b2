"""Ports to listen on: one that cannot be had is one sentence, whichever door wants it. No jax."""

from __future__ import annotations

import errno
import socket

from jaxinfer.serve.settings import ServeConfigError


def listen(host: str, port: int, setting: str, backlog: int | None = None) -> socket.socket:
    """A socket that listens.

    Args:
        setting: where the port stands.

    Raises:
        ServeConfigError: the port cannot be had.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=backlog)
    except OSError as cause:
        raise ServeConfigError(f"{setting}={port}: cannot listen on {host}: {_reason(cause, setting)}") from cause


def _reason(cause: OSError, setting: str) -> str:
    if cause.errno != errno.EADDRINUSE:
        return cause.strerror or str(cause)
    return f"another program does; end it, or take another port (--{setting.replace('_', '-')})"
