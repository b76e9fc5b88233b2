"""Servicer of `jaxinfer.v1.Inference`, based on a `Frontend`."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from typing import override

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceServicer
from jaxinfer.serve.api.errors import DuplicateIdError, Kind, ServeError, refused, rename_fields
from jaxinfer.serve.api.requests import Conversation
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc import convert, status
from jaxinfer.serve.grpc.answers import answering
from jaxinfer.serve.grpc.bidi_stream import ManyRequests
from jaxinfer.serve.grpc.chat import optional
from jaxinfer.serve.grpc.loras import model_of
from jaxinfer.serve.grpc.rpc import Rpc
from jaxinfer.serve.grpc.stream_writer import StreamWriter
from jaxinfer.text.output import OutputDelta


class Inference(InferenceServicer):
    """All RPCs of the service.

    Args:
        frontend: returns the front end, or raises `ServeError` while the model is loading.
        batch_size: maximum number of prompts in flight per GenerateBatch; further ones are read when one has ended.
    """

    def __init__(self, frontend: Callable[[], Frontend], batch_size: int = 256) -> None:
        self._frontend, self._batch_size = frontend, batch_size

    @override
    async def Generate(self, request: pb.GenerateRequest, rpc: Rpc) -> None:
        async with answering(self._frontend(), request, rpc) as answer:

            async def write(delta: OutputDelta) -> None:
                for response in answer.responses(delta):
                    await rpc.write(response)

            await rpc.write(answer.started())
            await StreamWriter(answer.generation, write).run()
            await rpc.write(answer.finished())

    @override
    async def GenerateBatch(self, requests: Rpc, rpc: Rpc) -> None:
        await Batch(self._frontend(), rpc, self._batch_size).run()

    @override
    async def Tokenize(self, request: pb.TokenizeRequest, rpc: Rpc) -> pb.TokenizeResponse:
        frontend = self._frontend()
        text = await convert.converted(convert.input_of, request, frontend.limits, "input")
        if not isinstance(text, str | Conversation):
            raise ServeError(Kind.INVALID, "input must be text or chat", field="input")
        with rename_fields(convert.names_of(request, "input")):
            ids = await frontend.tokenize(
                text,
                model=optional(request, "model"),
                add_special_tokens=optional(request, "add_special_tokens"),
                tenant=rpc.caller.name,
            )
        return await convert.tokenized(ids, frontend.card.max_model_len)

    @override
    async def Detokenize(self, request: pb.DetokenizeRequest, rpc: Rpc) -> pb.DetokenizeResponse:
        text = await self._frontend().detokenize(
            request.token_ids,
            model=optional(request, "model"),
            skip_special_tokens=request.skip_special_tokens,
        )
        return pb.DetokenizeResponse(text=text)

    @override
    async def Score(self, request: pb.ScoreRequest, rpc: Rpc) -> pb.ScoreResponse:
        frontend = self._frontend()
        with rename_fields(convert.names_of(request, "context")):
            results = await frontend.score(
                await convert.converted(convert.input_of, request, frontend.limits, "context"),
                convert.continuations_of(request, frontend.limits),
                model=model_of(frontend, request),
                add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
                timeout=rpc.time_remaining(),
                tenant=rpc.caller.name,
            )
        return convert.scored(results, frontend.token_text)

    @override
    async def GetModelInfo(self, request: pb.GetModelInfoRequest, rpc: Rpc) -> pb.ModelInfo:
        frontend = self._frontend()
        name = frontend.check_model(optional(request, "model"))
        return convert.model_info(
            dataclasses.replace(frontend.card, name=name),
            frontend.limits,
            has_tokenizer=frontend.tokenizer is not None,
            has_chat_template=frontend.template is not None,
        )


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
