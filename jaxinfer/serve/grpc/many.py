"""Many requests in one stream, of any service."""

from __future__ import annotations

import abc
import asyncio

from google.protobuf.message import Message
from grpc import aio

from jaxinfer.serve.errors import ServeError
from jaxinfer.serve.faults import answer_to
from jaxinfer.serve.frontend import Frontend
from jaxinfer.serve.generation import expired
from jaxinfer.serve.grpc.rpc import Rpc


class ManyRequests[Request: Message, Response: Message](abc.ABC):
    """One stream of requests, and the stream of their responses in the order in which they are made.

    A request is read when there is room for it: a client that sends more than ``size`` is held back by the transport.

    Args:
        rpc: owns the stream; its deadline is that of every request.
        size: requests in flight at most.
    """

    def __init__(self, frontend: Frontend, rpc: Rpc, size: int) -> None:
        self.frontend, self.rpc = frontend, rpc
        self._room = asyncio.Semaphore(size)
        self._writing = asyncio.Lock()

    @abc.abstractmethod
    async def answer(self, request: Request) -> None:
        """Write all responses to one request. What it raises ends this request only."""

    @abc.abstractmethod
    def failure(self, request: Request, error: ServeError) -> Response:
        """The last response to a request that ended by an error."""

    async def run(self) -> None:
        """Serve until the client has half-closed and all requests have ended.

        Raises:
            ServeError: a message is no request at all (what is in flight is aborted), or the stream's deadline has
                passed: each request that it ended has said so, and the stream ends as the client's own clock ends it.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while (request := await self._next()) is not None:
                    tasks.create_task(self._serve(request))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        left = self.rpc.time_remaining()
        if left is not None and left <= 0:
            raise expired()

    async def write(self, response: Response) -> None:
        """One response at a time, as the transport wants it."""
        async with self._writing:
            await self.rpc.write(response)

    async def _next(self) -> Request | None:
        await self._room.acquire()
        return await self.rpc.read()

    async def _serve(self, request: Request) -> None:
        try:
            await self.answer(request)
        except aio.BaseError:  # the transport's: the stream is over
            raise
        except Exception as fault:  # noqa: BLE001 - the border to the client: every fault gets an answer
            error = answer_to(fault)
            self.rpc.answered_with(error)
            await self.write(self.failure(request, error))
        finally:
            self._room.release()
