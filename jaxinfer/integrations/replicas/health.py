"""Whether a replica should be given up: not while its supervisor may bring the engine back. No jax."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxinfer.serve.core.supervisor import READY


class UnhealthyError(RuntimeError):
    """The replica does not serve, and nothing in it will mend that."""


class Patience:
    """Gives an engine time to come back.

    Args:
        seconds: that it may be away; starts that hang are ended by its supervisor before.
        clock: in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._since: float | None = None

    def look(self, state: str, failure: str | None) -> None:
        """Note how the engine is.

        Args:
            state: of the supervisor.
            failure: the sentence of what no restart mends.

        Raises:
            UnhealthyError: it has failed for good, or was away for too long.
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
