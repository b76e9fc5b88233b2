"""File descriptor limits, and the split between client connections and other uses. No jax."""

from __future__ import annotations

import dataclasses
import logging
import resource

from jaxinfer.serve.settings import ServeConfig, ServeConfigError

RESERVE = 160
"""Descriptors that are not for clients: pipes of the engine core and of helper processes, also restarted ones, reloaded
files, listening sockets, one connection to a trace collector."""
SPARE = 64
"""HTTP connections over the limit that still get a response: 503, except for /health and /ready."""
OPERATORS = 32
"""Connections to Control, and to the separate port of /metrics."""

_MOST = 1 << 16  # descriptors requested for this process; an unlimited hard limit may be 10**9
_FEWEST = 16

_log = logging.getLogger("jaxinfer.serve")


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit, 65536 at most, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def within(config: ServeConfig, limit: int) -> ServeConfig:
    """Return the settings with ``max_connections`` reduced to what ``limit`` descriptors allow.

    Raises:
        ServeConfigError: too few descriptors are left for connections.
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
