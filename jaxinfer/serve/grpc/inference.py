"""`jaxinfer.v1.Inference` over a `Frontend`."""

from __future__ import annotations

from collections.abc import Callable
from typing import override

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceServicer
from jaxinfer.serve.calls import Conversation
from jaxinfer.serve.errors import Kind, ServeError
from jaxinfer.serve.faults import in_its_words
from jaxinfer.serve.frontend import Frontend
from jaxinfer.serve.grpc import convert
from jaxinfer.serve.grpc.batch import Batch
from jaxinfer.serve.grpc.pump import Pump
from jaxinfer.serve.grpc.rpc import Rpc
from jaxinfer.text.output import OutputDelta


class Inference(InferenceServicer):
    """Every RPC of the service.

    Args:
        frontend: gives what is called, or raises `ServeError` while there is none: the model is being loaded.
        batch_size: prompts of one GenerateBatch that are in flight at most; more are not read before one has ended.
    """

    def __init__(self, frontend: Callable[[], Frontend], batch_size: int = 256) -> None:
        self._frontend, self._batch_size = frontend, batch_size

    @override
    async def Generate(self, request: pb.GenerateRequest, rpc: Rpc) -> None:
        frontend = self._frontend()
        left, trace = rpc.time_remaining(), rpc.trace()
        call = await convert.converted(
            convert.call_of, request, frontend.limits, timeout=left, tenant=rpc.caller.name, trace=trace
        )
        with in_its_words(convert.names_of(request, "input")):
            accepted = await frontend.generate(call)
        async with accepted as generation:
            request_id = generation.request_id

            async def write(delta: OutputDelta) -> None:
                for response in convert.deltas(request_id, delta, frontend.token_text):
                    await rpc.write(response)

            await rpc.write(convert.started(request_id, generation.seed, len(generation.prompt_token_ids)))
            await Pump(generation, write).run()
            await rpc.write(convert.finished(request_id, generation.usage))

    @override
    async def GenerateBatch(self, requests: Rpc, rpc: Rpc) -> None:
        await Batch(self._frontend(), rpc, self._batch_size).run()

    @override
    async def Tokenize(self, request: pb.TokenizeRequest, rpc: Rpc) -> pb.TokenizeResponse:
        frontend = self._frontend()
        text = await convert.converted(convert.input_of, request, frontend.limits, "input")
        if not isinstance(text, str | Conversation):
            raise ServeError(Kind.INVALID, "input must be text or chat", field="input")
        with in_its_words(convert.names_of(request, "input")):
            ids = await frontend.tokenize(
                text,
                model=convert.optional(request, "model"),
                add_special_tokens=convert.optional(request, "add_special_tokens"),
                tenant=rpc.caller.name,
            )
        return await convert.tokenized(ids, frontend.card.max_model_len)

    @override
    async def Detokenize(self, request: pb.DetokenizeRequest, rpc: Rpc) -> pb.DetokenizeResponse:
        text = await self._frontend().detokenize(
            request.token_ids,
            model=convert.optional(request, "model"),
            skip_special_tokens=request.skip_special_tokens,
        )
        return pb.DetokenizeResponse(text=text)

    @override
    async def Score(self, request: pb.ScoreRequest, rpc: Rpc) -> pb.ScoreResponse:
        frontend = self._frontend()
        with in_its_words(convert.names_of(request, "context")):
            results = await frontend.score(
                await convert.converted(convert.input_of, request, frontend.limits, "context"),
                convert.continuations_of(request, frontend.limits),
                model=convert.optional(request, "model"),
                add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
                timeout=rpc.time_remaining(),
                tenant=rpc.caller.name,
            )
        return convert.scored(results, frontend.token_text)

    @override
    async def GetModelInfo(self, request: pb.GetModelInfoRequest, rpc: Rpc) -> pb.ModelInfo:
        frontend = self._frontend()
        frontend.check_model(convert.optional(request, "model"))
        return convert.model_info(
            frontend.card,
            frontend.limits,
            has_tokenizer=frontend.tokenizer is not None,
            has_chat_template=frontend.template is not None,
        )
