"""Replica health: a replica counts as healthy while its supervisor may restart the engine. No jax."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxinfer.serve.core.supervisor import READY


class UnhealthyError(RuntimeError):
    """The replica does not serve and cannot recover."""


class Patience:
    """Health check that gives an engine time to restart.

    Args:
        seconds: maximum time without a ready engine; the supervisor ends hanging starts earlier.
        clock: in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._since: float | None = None

    def look(self, state: str, failure: str | None) -> None:
        """Record the engine's state.

        Args:
            state: engine state of the supervisor.
            failure: message of a failure that no restart fixes.

        Raises:
            UnhealthyError: the engine has failed permanently, or was not ready for too long.
        """
        if failure is not None:
            raise UnhealthyError(failure)
        if state == READY:
            self._since = None
            return
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since > self._seconds:
            raise UnhealthyError(f"the engine is {state}, and was not ready for {self._seconds:g} s")
