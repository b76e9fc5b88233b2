"""Write a generation to a stream of gRPC, for a little less than a task would cost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from jaxinfer.serve.generation import Generation
from jaxinfer.text.output import OutputDelta


class Pump:
    """Writes each piece of a generation when it comes.

    To wake a call's task for each token, and for the end of each write again, through all that stands between it and
    gRPC, costs more than the token's text and message. So a task of its own begins to write while the piece is handed
    over, and ends when there is no more. Pieces that come during a write are merged, as for any slow reader.

    Args:
        write: returns when the transport has taken the piece.
    """

    def __init__(self, generation: Generation, write: Callable[[OutputDelta], Awaitable[None]]) -> None:
        self._generation, self._write = generation, write
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._task: asyncio.Task[None] | None = None
        self._writing = False

    async def run(self) -> None:
        """Return when all is written. Once.

        Raises:
            Exception: whatever the generation or ``write`` raised.
        """
        self._generation.listen(self._begin)
        self._begin()
        try:
            await self._ended
        finally:
            if self._task is not None:
                self._task.cancel()
            if self._ended.done() and not self._ended.cancelled():
                self._ended.exception()  # seen, even if this call was cancelled at the same time

    def _begin(self) -> None:
        if not self._writing and not self._ended.done():
            self._writing = True
            self._task = asyncio.Task(self._write_all(), loop=self._loop, eager_start=True)

    async def _write_all(self) -> None:
        """Write the deltas that are there now, and those that come meanwhile."""
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
        if self._ended.done():  # who runs it was cancelled
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
