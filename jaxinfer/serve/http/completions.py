"""Endpoints ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.parsers.events import Content, Event, Reasoning, message_of
from jaxinfer.parsers.registry import Parsers
from jaxinfer.sampling_params import EXTRAS
from jaxinfer.serve.api.errors import rename_fields
from jaxinfer.serve.api.json_bodies import read_json
from jaxinfer.serve.api.requests import Call, Input
from jaxinfer.serve.frontend.chat.messages import tool_call
from jaxinfer.serve.frontend.chat.outputs import TOOL_CALLS, CallDelta, ParsedOutput, call_deltas, outputs_of
from jaxinfer.serve.frontend.chat.terms import ChatTerms
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.serve.http import answers, prompts
from jaxinfer.serve.http.answers import Envelope, EventStream, Reply
from jaxinfer.serve.http.app_state import AppState, fingerprint
from jaxinfer.serve.http.choices import ChatChoice, Echo, ResponseFields, TextChoice, TokenSpeller
from jaxinfer.serve.http.fields import checked
from jaxinfer.serve.http.middleware import usable_id
from jaxinfer.serve.http.requests import ChatCompletionRequest, CompletionRequest, Sampling
from jaxinfer.serve.telemetry.tracing import HEADERS
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import LoRARef


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat request whose generation has started.

    Attributes:
        body: the client's body, or the chat body that another API (Messages, Responses) built from its own.
        name: the request id.
        parsers: reasoning and tool parsers that read its outputs.
    """

    frontend: Frontend
    body: ChatCompletionRequest
    name: str
    generation: Generation
    parsers: Parsers

    @property
    def terms(self) -> ChatTerms:
        return prompts.terms_of(self.body)

    @property
    def model(self) -> str:
        """Name of the model, or of the LoRA adapter that the request selected."""
        lora = self.generation.lora
        return self.frontend.card.name if lora is None else lora.name


async def complete(request: Request) -> Response:
    """Serve ``/v1/completions``: prompts as text or token ids, ``n`` choices for each prompt."""
    door: AppState = request.app.state.door
    body = checked(CompletionRequest, await read_json(request, door.limits, door.long.read))
    frontend, texts = door.serving(), prompts.prompts_of(body, door.limits)
    sampling = prompts.sampling_of_completion(body, door.limits)
    name = _id(request, body)
    names = [name] if len(texts) == 1 else [f"{name}-{i}" for i in range(len(texts))]
    special = body.add_special_tokens is not False
    calls = [
        _call(request, body, prompt, sampling, each, add_special_tokens=special)
        async for prompt, each in answers.in_turn(zip(texts, names, strict=True))
    ]
    generations = await answers.start(frontend, calls, prompts.names_in_prompts(body))
    try:
        replies = []
        async for place, (prompt, each) in answers.in_turn(enumerate(zip(texts, generations, strict=True))):
            echo = await _echo(frontend, body, prompt, each)
            replies.append(_text_reply(frontend, body, each, place, echo))
    except BaseException:
        for generation in generations:
            await generation.aclose()
        raise
    envelope = _envelope(door, frontend, f"cmpl-{name}", "text_completion", generations[0].lora)
    return await _answer(request, body, envelope, replies, envelope)


async def chat(request: Request) -> Response:
    """Serve ``/v1/chat/completions``: messages rendered with the chat template of the checkpoint."""
    door: AppState = request.app.state.door
    body = checked(ChatCompletionRequest, await read_json(request, door.limits, door.long.read))
    chat = await begin_chat(request, body)
    reply = Reply(chat.generation, _chat_choices(door, chat))
    extra = {"prompt_token_ids": list(chat.generation.prompt_token_ids)} if body.return_token_ids else {}
    name, frontend, lora = f"chatcmpl-{chat.name}", chat.frontend, chat.generation.lora
    envelope = _envelope(door, frontend, name, "chat.completion", lora, extra)
    chunks = _envelope(door, frontend, name, "chat.completion.chunk", lora, extra)
    return await _answer(request, body, envelope, [reply], chunks)


async def begin_chat(request: Request, body: ChatCompletionRequest) -> Chat:
    """Start the generation of a chat body; shared by the chat, Messages and Responses endpoints.

    Raises:
        ServeError: the request is rejected; fields are named as in ``body``.
    """
    door: AppState = request.app.state.door
    frontend, name = door.serving(), _id(request, body)
    terms = prompts.terms_of(body)
    parsers = terms.parsers(frontend.parsers)
    sampling = terms.held(prompts.sampling_of_chat(body, door.limits), parsers)
    call = _call(request, body, await prompts.conversation_of(body, door.limits), sampling, name, shown=parsers.markers)
    with rename_fields(prompts.names_in_chat(body)):
        generation = await frontend.generate(call)
    return Chat(frontend, body, name, generation, parsers)


def id_headers(body: Sampling) -> dict[str, str]:
    """Return the ``x-request-id`` header if the body sets a usable request id."""
    return {"x-request-id": body.request_id} if body.request_id and usable_id(body.request_id) else {}


async def _answer(
    request: Request, body: Sampling, envelope: Envelope, replies: list[Reply], chunks: Envelope
) -> Response:
    headers = id_headers(body)
    if body.stream:
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        door: AppState = request.app.state.door
        return EventStream(chunks, replies, with_usage=with_usage, headers=headers, door=door)
    try:
        found = await answers.while_connected(request.receive, answers.whole(envelope, replies))
    finally:
        await answers.close(replies)
    return Response(found, headers=headers, media_type="application/json")


def _call(
    request: Request,
    body: Sampling,
    prompt: Input,
    sampling: Mapping[str, Any],
    name: str,
    *,
    add_special_tokens: bool = True,
    shown: frozenset[str] = frozenset(),
) -> Call:
    headers = request.headers
    return Call(
        prompt=prompt,
        sampling=sampling,
        model=body.model,
        request_id=name,
        add_special_tokens=add_special_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        timeout=answers.timeout_of(headers.get("x-request-timeout")),
        tenant=request.state.tenant,
        shown=shown,
        trace={header: headers[header] for header in HEADERS if header in headers},
    )


def _chat_choices(door: AppState, chat: Chat) -> list[ChatChoice]:
    """Return a choice for each output; outputs that need a reasoning or tool parser get their own parser."""
    body, frontend = chat.body, chat.frontend
    wanted = _wanted(frontend, body, (body.top_logprobs or 0) if body.logprobs else None)
    names = () if body.include_reasoning is False else door.reasoning_fields
    outputs = outputs_of(
        chat.generation,
        chat.terms,
        chat.parsers,
        frontend.tokenizer,
        frontend.token_bytes,
        skips_special=bool(wanted.hidden),
    )
    return [
        ChatChoice(index, frontend, wanted) if output is None else MessageChoice(index, frontend, wanted, output, names)
        for index, output in enumerate(outputs)
    ]


def _id(request: Request, body: Sampling) -> str:
    return request.state.request_id if body.request_id is None else body.request_id


def _envelope(
    door: AppState, frontend: Frontend, name: str, kind: str, lora: LoRARef | None, extra: dict[str, Any] | None = None
) -> Envelope:
    model = frontend.card.name if lora is None else lora.name
    return Envelope(name, kind, int(time.time()), model, fingerprint(frontend, door.version, lora), extra or {})


def _wanted(frontend: Frontend, body: Sampling, logprobs: int | None) -> ResponseFields:
    tokenizer = frontend.tokenizer
    skip = body.skip_special_tokens is not False and tokenizer is not None
    return ResponseFields(
        logprobs=logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        arrays=any(getattr(body, name) for name in EXTRAS) or logprobs == -1,
        hidden=frozenset(tokenizer.special_ids) if skip and tokenizer is not None else frozenset(),
    )


async def _echo(
    frontend: Frontend, body: CompletionRequest, prompt: str | Sequence[int], generation: Generation
) -> Echo | None:
    if not body.echo:
        return None
    skip = body.skip_special_tokens is not False
    text = prompt if isinstance(prompt, str) else await frontend.detokenize(prompt, skip_special_tokens=skip)
    return Echo(text, generation.prompt_token_ids, only=prompts.scores_only(body))


def _text_reply(
    frontend: Frontend, body: CompletionRequest, generation: Generation, place: int, echo: Echo | None
) -> Reply:
    wanted = _wanted(frontend, body, body.logprobs)
    first = place * generation.n
    choices = [
        TextChoice(first + output, frontend, wanted, generation.prompt_token_ids, echo)
        for output in range(generation.n)
    ]
    waits = echo is not None and wanted.logprobs
    return Reply(generation, choices, echoes_logprobs=waits, shown=0 if echo is not None and echo.only else 1)


class MessageChoice(ChatChoice):
    """Choice of ``/v1/chat/completions`` read by a parser (``output``); ``names``: fields that hold the reasoning."""

    def __init__(
        self, index: int, words: TokenSpeller, wanted: ResponseFields, output: ParsedOutput, names: Sequence[str]
    ) -> None:
        super().__init__(index, words, wanted)
        self._output, self._names = output, names
        self._events: list[Event] = []

    @property
    def reasoning_tokens(self) -> int | None:
        return self._output.reasoning_tokens

    def chunks(self, delta: OutputDelta) -> Sequence[str]:
        fields = self._fields(self._output.read(delta))
        found = []
        if fields or delta.prompt_logprobs is not None or (delta.token_ids and not self._plain):
            more = dataclasses.replace(delta, finish_reason=None, stop_reason=None, acceptance=None)
            found.append(json.dumps(self._shape(more, "delta", fields, None)))
        if delta.finish_reason is not None:
            last = dataclasses.replace(delta, text="", token_ids=[], logprobs=(), prompt_logprobs=None)
            found.append(json.dumps(self._shape(last, "delta", {}, self._output.reason(delta))))
        return found

    def take(self, delta: OutputDelta) -> None:
        self._parts.add(delta)
        self._events += self._output.read(delta)

    def whole(self) -> dict[str, Any]:
        delta, found = self._parts.delta(self._index), message_of(self._events)
        silent = bool(found.calls or found.reasoning) and not found.content
        message: dict[str, Any] = {"role": "assistant", "content": None if silent else found.content, "refusal": None}
        message |= dict.fromkeys(self._names, found.reasoning or None)
        if found.calls:
            message[TOOL_CALLS] = [tool_call(call.id, call.name, call.arguments) for call in found.calls]
        return self._shape(delta, "message", message, self._output.reason(delta))

    def _fields(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return the message fields of a chunk. All events of a chunk come from one delta, which may be large."""
        part = message_of([event for event in events if isinstance(event, Content | Reasoning)])
        found = dict.fromkeys(self._names, part.reasoning) if part.reasoning else {}
        if part.content:
            found["content"] = part.content
        calls = [_call_delta(call) for call in call_deltas(events)]
        return {**found, TOOL_CALLS: calls} if calls else found


def _call_delta(call: CallDelta) -> dict[str, Any]:
    """Return OpenAI's tool call delta; the first delta of a call has its id, type and name."""
    if call.id is None or call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **tool_call(call.id, call.name, call.arguments)}
