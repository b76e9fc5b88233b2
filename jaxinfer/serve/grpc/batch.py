"""`GenerateBatch` RPC: many prompts in one stream."""

from __future__ import annotations

import uuid
from typing import override

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.errors import DuplicateIdError, ServeError, refused
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc import status
from jaxinfer.serve.grpc.answers import answering
from jaxinfer.serve.grpc.bidi_stream import ManyRequests
from jaxinfer.serve.grpc.rpc import Rpc

_REMEMBERED = 1 << 17
"""Maximum number of recent request ids of a stream that are checked for duplicates."""


class Batch(ManyRequests[pb.GenerateRequest, pb.GenerateResponse]):
    """Stream of a GenerateBatch call. Errors contain the id of their request; requests without an id are given one."""

    def __init__(self, frontend: Frontend, rpc: Rpc, size: int) -> None:
        super().__init__(frontend, rpc, size)
        self._seen: dict[str, None] = {}

    @override
    async def answer(self, request: pb.GenerateRequest) -> None:
        if not request.HasField("request_id"):
            request.request_id = uuid.uuid4().hex
        self._remember(request.request_id)
        async with answering(self.frontend, request, self.rpc) as answer:
            await self.write(answer.started())
            async for delta in answer.generation:
                for response in answer.responses(delta):
                    await self.write(response)
            await self.write(answer.finished())

    @override
    def failure(self, request: pb.GenerateRequest, error: ServeError) -> pb.GenerateResponse:
        return pb.GenerateResponse(request_id=request.request_id, error=status.error_message(error))

    def _remember(self, request_id: str) -> None:
        if request_id in self._seen:
            raise refused(DuplicateIdError("request_id", f"={request_id!r} was used before in this stream"))
        self._seen[request_id] = None
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
