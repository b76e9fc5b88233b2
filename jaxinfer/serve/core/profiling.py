"""Device profiles that end by themselves, after a number of steps. No jax."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxinfer.serve.api.errors import invalid

MAX_STEPS = 1000
"""Most steps of one profile, and their default."""
MAX_SECONDS = 60.0
"""Seconds after which a profile ends, however few steps there were."""
_TICK = 0.001  # seconds: a step of a small model

_log = logging.getLogger("jaxinfer.serve.core")


def checked_steps(steps: int | None, field: str = "steps") -> int:
    """Return the steps of a profile. Raises `ServeError` INVALID unless there are 1 to `MAX_STEPS`."""
    if steps is not None and not 1 <= steps <= MAX_STEPS:
        raise invalid(field, steps, f"must be within 1 and {MAX_STEPS}")
    return MAX_STEPS if steps is None else steps


@runtime_checkable
class Profiler(Protocol):
    """A device profiler. Both methods raise RuntimeError, with one sentence, if profiling is not possible now."""

    def start(self) -> None: ...

    def stop(self) -> str:
        """Stop the profile and return the folder with the trace."""
        ...


class Profiling:
    """Profiles of a running engine, one at a time. Nothing is done, and nothing costs, between them.

    Args:
        profiler: called in other threads: it writes files.
        steps: returns the steps that the engine has done.
        seconds: see `MAX_SECONDS`.
    """

    def __init__(self, profiler: Profiler, steps: Callable[[], int], seconds: float = MAX_SECONDS) -> None:
        self._profiler, self._steps, self._seconds = profiler, steps, seconds
        self._changing = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None  # of the current profile, or of the last one
        self._folder: str | None = None  # of the last profile, if it has ended by itself and no caller has asked

    async def start(self, steps: int) -> None:
        """Start a profile of so many steps, and a few more that run while it ends. Raises RuntimeError: it cannot."""
        async with self._changing:
            await asyncio.to_thread(self._profiler.start)
            self._folder = None
            self._watch = asyncio.create_task(self._end_after(self._steps() + steps))

    async def stop(self) -> str:
        """End the profile, unless it has ended, and return the folder with the trace. Raises RuntimeError: there is
        none, or it cannot be written."""
        async with self._changing:
            if self._folder is None:
                if self._watch is not None:
                    self._watch.cancel()
                return await asyncio.to_thread(self._profiler.stop)
            folder, self._folder = self._folder, None
            return folder

    async def wait(self) -> None:
        """Wait until no profile runs."""
        if self._watch is not None:
            await asyncio.wait({self._watch})

    async def _end_after(self, last: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                while self._steps() < last:
                    await asyncio.sleep(_TICK)
        async with self._changing:
            try:
                self._folder = await asyncio.to_thread(self._profiler.stop)
            except (RuntimeError, OSError):  # the folder cannot be written
                _log.exception("a profile could not be written")
