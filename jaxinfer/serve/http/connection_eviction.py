"""Eviction at the connection limit: the longest idle connection of the least trusted class is closed."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

CROWDED, STRANGER, KNOWN = range(3)
"""Connection classes: above the connection limit; has made no authorised request yet; has made one."""


@runtime_checkable
class Waiting(Protocol):
    """A connection on which no request is being answered."""

    def give_way(self) -> None: ...


class Idle:
    """Idle connections of one server, by class and in order of idle time.

    Updated once or twice per request, never per token.
    """

    def __init__(self) -> None:
        self._waiting: tuple[dict[Waiting, None], ...] = ({}, {}, {})

    def add(self, connection: Waiting, account: int) -> None:
        """Register a connection that becomes idle. ``account``: `CROWDED`, `STRANGER` or `KNOWN`."""
        self.discard(connection)
        self._waiting[account][connection] = None

    def discard(self, connection: Waiting) -> None:
        """Remove a connection that is no longer idle, or has ended."""
        for waiting in self._waiting:
            waiting.pop(connection, None)

    def make_room(self, *accounts: int) -> bool:
        """Close the longest idle connection of the first of these classes that has any; return whether one was."""
        for waiting in (self._waiting[account] for account in accounts):
            if waiting:
                longest = next(iter(waiting))
                del waiting[longest]
                longest.give_way()
                return True
        return False
