"""Writer of a generation to a gRPC stream, at a lower cost per token than a blocked task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.text.output import OutputDelta


class StreamWriter:
    """Writes each delta of a generation as it arrives.

    Waking the call's task for each token and again for the end of each write, through all layers above gRPC, costs more
    than the token's text and message. Instead, a new task starts to write eagerly while the delta is handed over, and
    ends when there are no more deltas. Deltas that arrive during a write are merged, as for any slow reader.

    Args:
        write: returns when the transport has accepted the delta.
    """

    def __init__(self, generation: Generation, write: Callable[[OutputDelta], Awaitable[None]]) -> None:
        self._generation, self._write = generation, write
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._task: asyncio.Task[None] | None = None
        self._writing = False

    async def run(self) -> None:
        """Write the generation and return when all is written. May be called once.

        Raises:
            Exception: any error raised by the generation or by ``write``.
        """
        self._generation.listen(self._begin)
        self._begin()
        try:
            await self._ended
        finally:
            if self._task is not None:
                self._task.cancel()
            if self._ended.done() and not self._ended.cancelled():
                self._ended.exception()  # marks it as retrieved, even if this call was cancelled at the same time

    def _begin(self) -> None:
        if not self._writing and not self._ended.done():
            self._writing = True
            self._task = asyncio.Task(self._write_all(), loop=self._loop, eager_start=True)

    async def _write_all(self) -> None:
        """Write the available deltas, and those that arrive meanwhile."""
        try:
            while not self._generation.idle:
                await self._write(await self._generation.__anext__())
        except StopAsyncIteration:
            self._end(None)
        except Exception as error:  # noqa: BLE001 - it is raised by `run`
            self._end(error)
        finally:
            self._writing = False

    def _end(self, error: Exception | None) -> None:
        if self._ended.done():  # `run` was cancelled
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
