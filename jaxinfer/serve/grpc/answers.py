"""Responses to one `GenerateRequest`, alone or in a batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence

from jaxinfer.parsers.registry import Parsers
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.errors import rename_fields
from jaxinfer.serve.api.requests import Conversation
from jaxinfer.serve.frontend.chat.outputs import ParsedOutput, outputs_of
from jaxinfer.serve.frontend.chat.terms import ChatTerms
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.serve.grpc import chat, convert
from jaxinfer.serve.grpc.loras import model_of
from jaxinfer.serve.grpc.rpc import Rpc
from jaxinfer.text.output import OutputDelta


@dataclasses.dataclass(frozen=True)
class Answer:
    """Responses to an accepted request.

    Attributes:
        model: name of the model or LoRA adapter.
        outputs: parsers by output index; None: the output is not parsed.
    """

    frontend: Frontend
    generation: Generation
    model: str
    outputs: Sequence[ParsedOutput | None]

    def started(self) -> pb.GenerateResponse:
        made = self.generation
        return convert.started(made.request_id, made.seed, len(made.prompt_token_ids), self.model)

    def responses(self, delta: OutputDelta) -> Iterator[pb.GenerateResponse]:
        """Return the responses for a delta, see `convert.deltas`."""
        output = self.outputs[delta.index]
        shown = delta if output is None else convert.parsed(delta, output)
        return convert.deltas(self.generation.request_id, shown, self.frontend.token_text)

    def finished(self) -> pb.GenerateResponse:
        return convert.finished(self.generation.request_id, self.generation.usage)


@contextlib.asynccontextmanager
async def answering(frontend: Frontend, request: pb.GenerateRequest, rpc: Rpc) -> AsyncIterator[Answer]:
    """Start a generation within the context; leaving the context early aborts it.

    Raises:
        ServeError: the request is rejected.
    """
    left, trace = rpc.time_remaining(), rpc.trace()
    call = await convert.converted(
        convert.call_of, request, frontend.limits, timeout=left, tenant=rpc.caller.name, trace=trace
    )
    call = dataclasses.replace(call, model=model_of(frontend, request))
    terms, parsers = ChatTerms(), Parsers()
    with rename_fields(convert.names_of(request, "input")):
        if isinstance(call.prompt, Conversation):
            terms = chat.terms_of(request.chat, call.prompt.tools)
            parsers = chat.parsers_of(request.chat, terms, frontend.parsers)
            call = dataclasses.replace(call, sampling=terms.held(call.sampling, parsers))
        accepted = await frontend.generate(dataclasses.replace(call, shown=parsers.markers))
    async with accepted as generation:
        model = frontend.card.name if call.model is None else call.model
        outputs = outputs_of(generation, terms, parsers, frontend.tokenizer, frontend.token_bytes)
        yield Answer(frontend, generation, model, outputs)
