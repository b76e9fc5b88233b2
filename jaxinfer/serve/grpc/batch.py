"""`GenerateBatch`: many prompts in one stream."""

from __future__ import annotations

import asyncio
import uuid

from google.protobuf.message import Message
from grpc import aio

from jaxinfer.serve.errors import DuplicateIdError, refused
from jaxinfer.serve.faults import answer_to
from jaxinfer.serve.frontend import Frontend
from jaxinfer.serve.grpc import convert, status
from jaxinfer.serve.grpc.rpc import Rpc
from jaxinfer.v1 import inference_pb2 as pb

_REMEMBERED = 1 << 17
"""Ids of one stream that are compared with later ones: of a longer stream, the last so many."""


class Batch:
    """One stream of requests and the stream of their responses.

    A request is read when there is room for it: a client that sends more than `size` is held back by the transport.
    A request without an id gets one here, so that its error has one too.

    Args:
        rpc: owns the stream; its deadline is that of every request.
        size: requests in flight at most.
    """

    def __init__(self, frontend: Frontend, rpc: Rpc, size: int) -> None:
        self._frontend, self._rpc = frontend, rpc
        self._room = asyncio.Semaphore(size)
        self._writing = asyncio.Lock()
        self._seen: dict[str, None] = {}

    async def run(self) -> None:
        """Serve until the client has half-closed and all requests have ended.

        Raises:
            ServeError: a message is no request at all; what is in flight is aborted.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while (request := await self._next()) is not None:
                    tasks.create_task(self._serve(request))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _next(self) -> Message | None:
        await self._room.acquire()
        return await self._rpc.read()

    async def _serve(self, request: pb.GenerateRequest) -> None:
        request_id = request.request_id if request.HasField("request_id") else uuid.uuid4().hex
        try:
            self._remember(request_id)
            await self._generate(request, request_id)
        except aio.BaseError:  # the transport's: the stream is over
            raise
        except Exception as fault:  # noqa: BLE001 - the border to the client: every fault gets an answer
            error = status.error_message(answer_to(fault))
            await self._write(pb.GenerateResponse(request_id=request_id, error=error))
        finally:
            self._room.release()

    def _remember(self, request_id: str) -> None:
        if request_id in self._seen:
            raise refused(DuplicateIdError(f"request_id={request_id!r} was used before in this stream"))
        self._seen[request_id] = None
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]

    async def _generate(self, request: pb.GenerateRequest, request_id: str) -> None:
        rpc, frontend = self._rpc, self._frontend
        call = convert.call_of(
            request, request_id=request_id, timeout=rpc.time_remaining(), tenant=rpc.caller.name, trace=rpc.trace()
        )
        async with await frontend.generate(call) as generation:
            prompt_tokens = len(generation.prompt_token_ids)
            await self._write(convert.started(request_id, generation.seed, prompt_tokens))
            async for delta in generation:
                for response in convert.deltas(request_id, delta, frontend.token_text):
                    await self._write(response)
            await self._write(convert.finished(request_id, generation.usage))

    async def _write(self, response: pb.GenerateResponse) -> None:
        async with self._writing:
            await self._rpc.write(response)
