"""Streams of many requests, for any service."""

from __future__ import annotations

import abc
import asyncio

from google.protobuf.message import Message
from grpc import aio

from jaxinfer.serve.api.errors import ServeError, answer_to
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.generation import expired
from jaxinfer.serve.grpc.rpc import Rpc


class ManyRequests[Request: Message, Response: Message](abc.ABC):
    """A stream of requests and the stream of their responses, in the order in which they are produced.

    A request is read when fewer than ``size`` are in flight: a client that sends more is blocked by flow control.

    Args:
        rpc: owns the stream; its deadline applies to every request.
        size: maximum number of requests in flight.
    """

    def __init__(self, frontend: Frontend, rpc: Rpc, size: int) -> None:
        self.frontend, self.rpc = frontend, rpc
        self._room = asyncio.Semaphore(size)
        self._writing = asyncio.Lock()

    @abc.abstractmethod
    async def answer(self, request: Request) -> None:
        """Write all responses to one request. An exception ends only this request."""

    @abc.abstractmethod
    def failure(self, request: Request, error: ServeError) -> Response:
        """Return the last response to a request that failed."""

    async def run(self) -> None:
        """Serve until the client has half-closed and all requests have ended.

        Raises:
            ServeError: a message is not a valid request (requests in flight are aborted), or the deadline of the stream
                has passed: the requests that it ended have reported it, and the stream ends with the same status.
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
        """Write a response; responses are serialized, as the transport requires."""
        async with self._writing:
            await self.rpc.write(response)

    async def _next(self) -> Request | None:
        await self._room.acquire()
        return await self.rpc.read()

    async def _serve(self, request: Request) -> None:
        try:
            await self.answer(request)
        except aio.BaseError:  # raised by the transport: the stream has ended
            raise
        except Exception as fault:  # noqa: BLE001 - the border to the client: every fault gets an answer
            error = answer_to(fault)
            self.rpc.answered_with(error)
            await self.write(self.failure(request, error))
        finally:
            self._room.release()
