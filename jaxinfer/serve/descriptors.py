"""Limits of open files and sockets, and who gets them. No jax."""

from __future__ import annotations

import dataclasses
import logging
import resource

from jaxinfer.serve.settings import ServeConfig, ServeConfigError

RESERVE = 160
"""Descriptors for everything but clients: the engine's and the helpers' pipes, also of those that are started again,
files that are read again, sockets of the doors, one connection to a collector of traces."""
SPARE = 64
"""HTTP connections beyond those that are allowed which are still answered: with 503, but for /health and /ready."""
OPERATORS = 32
"""Connections to Control, and to the port of /metrics alone."""

_MOST = 1 << 16  # what a process asks for itself; a system's unlimited may be a thousand million
_FEWEST = 16

_log = logging.getLogger("jaxinfer.serve")


def raise_limit() -> int:
    """Let this process have as many as it may; how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def within(config: ServeConfig, limit: int) -> ServeConfig:
    """The settings with no more connections than ``limit`` descriptors are enough for.

    Raises:
        ServeConfigError: they are enough for hardly any.
    """
    doors = 1 + (config.http_port is not None)
    fixed = RESERVE + SPARE * (doors - 1)
    fixed += OPERATORS * (config.control_port is not None)
    fixed += (OPERATORS + SPARE) * (config.metrics_port is not None)
    room = (limit - fixed) // doors
    if room >= config.max_connections:
        return config
    if room < min(_FEWEST, config.max_connections):
        reason = f"of which {fixed} are for other things than clients: it must be {fixed + doors * _FEWEST} or more"
        raise ServeConfigError(f"max_connections = {config.max_connections}: {limit} files may be open, {reason}")
    message = "max_connections = %d: %d for each door, as no more than %d files may be open (ulimit -n)"
    _log.warning(message, config.max_connections, room, limit)
    return dataclasses.replace(config, max_connections=room)
