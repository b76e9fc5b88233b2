"""Choose the connection that gives way where there is no room: the one of least account that waits longest."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

CROWDED, STRANGER, KNOWN = range(3)
"""Accounts: beyond those that are allowed; never had a request that anybody was allowed to make; had one."""


@runtime_checkable
class Waiting(Protocol):
    """A connection on which no request is being answered."""

    def give_way(self) -> None: ...


class Idle:
    """The connections of one server on which no request is being answered, by account and in order of time.

    An entry or two for each request, none for a token.
    """

    def __init__(self) -> None:
        self._waiting: tuple[dict[Waiting, None], ...] = ({}, {}, {})

    def add(self, connection: Waiting, account: int) -> None:
        """Enter a connection that begins to wait. ``account``: one of the three above."""
        self.discard(connection)
        self._waiting[account][connection] = None

    def discard(self, connection: Waiting) -> None:
        """Remove a connection that waits no more, or has ended."""
        for waiting in self._waiting:
            waiting.pop(connection, None)

    def make_room(self, *accounts: int) -> bool:
        """Let the one go that waits longest, of the first of these accounts that has any; whether there was one."""
        for waiting in (self._waiting[account] for account in accounts):
            if waiting:
                longest = next(iter(waiting))
                del waiting[longest]
                longest.give_way()
                return True
        return False
