"""Listening sockets, with a one-sentence error for a port that is not available. No jax."""

from __future__ import annotations

import errno
import socket

from jaxinfer.serve.settings import ServeConfigError


def listen(host: str, port: int, setting: str, backlog: int | None = None) -> socket.socket:
    """Return a listening socket.

    Args:
        setting: name of the setting of the port.

    Raises:
        ServeConfigError: the port is not available.
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
