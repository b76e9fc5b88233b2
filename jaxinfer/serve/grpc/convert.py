"""Conversion between messages of protos/jaxinfer/v1/inference.proto and records of `jaxinfer.serve.api.requests`.

The conversion is lossless: a field that the client did not set is not set in the `Call`. The front end validates
values; only values that a `Call` cannot represent are rejected here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, cast

from google.protobuf.message import Message

from jaxinfer.parsers.events import message_of
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.api.arrays import kept_ids
from jaxinfer.serve.api.errors import Kind, ServeError, prompt_as
from jaxinfer.serve.api.requests import Call, Input, ModelCard, Scored, ServeLimits, Usage
from jaxinfer.serve.frontend.chat.outputs import TOOL_CALLS, CallDelta, ParsedOutput, call_deltas
from jaxinfer.serve.grpc import chat
from jaxinfer.serve.grpc.chat import optional
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import PositionLogprobs, TokenLogprob, WeightVersions, version_ranges

TokenText = Callable[[int], str]
"""Function that returns a token's text, see `Frontend.token_text`."""

_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    TOOL_CALLS: pb.FINISH_REASON_TOOL_CALLS,
}
# Logprob candidates (`PositionLogprobs.weight`) per message: those of a long prompt could exceed the size that clients
# accept (4 MiB).
_MAX_CANDIDATES = 16384
_FEW, _SHORT_BYTES = 64, 16 << 10
_CHUNK = 4096


# ---- requests


def call_of(
    request: pb.GenerateRequest,
    *,
    timeout: float | None = None,
    tenant: str = "",
    trace: Mapping[str, str] | None = None,
) -> Call:
    """Convert a client's request to a call.

    Raises:
        ServeError: the input is missing, or a field is not valid JSON.
    """
    return Call(
        prompt=input_of(request, "input"),
        sampling=sampling_of(request.sampling),
        model=optional(request, "model"),
        request_id=request.request_id if request.HasField("request_id") else None,
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout=timeout,
        tenant=tenant,
        trace=trace or {},
    )


def input_of(message: Any, oneof: str) -> Input:
    """Return the text, token ids or conversation in a message's ``oneof``.

    Raises:
        ServeError: none is set.
    """
    match message.WhichOneof(oneof):
        case "token_ids":
            ids: Sequence[int] = message.token_ids.ids  # not copied yet: the validator checks the length first
            return ids
        case "chat":
            return chat.conversation_of(message.chat)
        case str() as field:
            return cast(str, getattr(message, field))
        case _:
            names = [field.name for field in message.DESCRIPTOR.oneofs_by_name[oneof].fields]
            raise ServeError(Kind.INVALID, f"{oneof} is not set: give one of {', '.join(names)}", field=oneof)


def names_of(message: Any, oneof: str) -> dict[str, str]:
    """Map the front end's fields to their names in a message with this ``oneof``, see `rename_fields`."""
    field = message.WhichOneof(oneof)
    if field != "chat":
        return prompt_as(field or oneof)
    return {**prompt_as("chat.messages"), **chat.NAMES, "variables": "chat.template_variables"}


def sampling_of(message: pb.SamplingParams) -> dict[str, Any]:
    """Return the fields that are set. Long lists and maps are returned uncopied."""
    return {field.name: _bare(value) for field, value in message.ListFields()}


def _bare(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, pb.Speculation | pb.StructuredOutputs):
        return {field.name: _bare(each) for field, each in value.ListFields()}
    items = value.ids if isinstance(value, pb.TokenIds) else value
    if len(items) > _CHUNK:  # the validator checks the length before it copies
        return items
    return dict(items) if isinstance(items, Mapping) else list(items)


async def converted[M: Message, **P, T](
    convert: Callable[Concatenate[M, P], T], request: M, limits: ServeLimits, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return ``convert(request, ...)``, run in a thread if the request holds a long conversation.

    Raises:
        ServeError: the conversation has too many messages, or ``convert`` rejects it.
    """
    talk = getattr(request, "chat", None)
    if talk is not None and len(talk.messages) > limits.messages:
        many = f"chat.messages must be at most {limits.messages}, not {len(talk.messages)}"
        raise ServeError(Kind.INVALID, many, field="chat.messages")
    if talk is None or (len(talk.messages) <= _FEW and talk.ByteSize() <= _SHORT_BYTES):
        return convert(request, *args, **kwargs)
    return await asyncio.to_thread(convert, request, *args, **kwargs)


def continuations_of(request: pb.ScoreRequest, limits: ServeLimits) -> list[str | Sequence[int]]:
    """Return the continuations. Raises `ServeError`: there are too many, or one has neither text nor token ids."""
    if (many := len(request.continuations)) > (most := limits.score_continuations):
        raise ServeError(Kind.INVALID, f"continuations must be 1 to {most}, not {many}", field="continuations")
    found: list[str | Sequence[int]] = []
    for i, continuation in enumerate(request.continuations):
        if continuation.WhichOneof("content") is None:
            field = f"continuations[{i}]"
            raise ServeError(Kind.INVALID, f"{field} is not set: give one of text, token_ids", field=field)
        found.append(cast("str | Sequence[int]", input_of(continuation, "content")))
    return found


# ---- responses


@dataclasses.dataclass(slots=True)
class ParsedDelta(OutputDelta):
    """A delta after parsing: ``text`` is content only, ``finish_reason`` may be `TOOL_CALLS`."""

    reasoning: str = ""
    calls: Sequence[CallDelta] = ()


def parsed(delta: OutputDelta, output: ParsedOutput) -> ParsedDelta:
    """Return the delta as parsed by ``output``."""
    events = output.read(delta)
    found = message_of(events)
    fields = {field.name: getattr(delta, field.name) for field in dataclasses.fields(delta)}
    fields |= {"text": found.content, "finish_reason": output.reason(delta)}
    return ParsedDelta(**fields, reasoning=found.reasoning, calls=call_deltas(events))


def started(request_id: str, seed: int, prompt_tokens: int, model: str) -> pb.GenerateResponse:
    """Return the first response. A seed of 2^63 or more is sent as the equivalent negative int64."""
    signed = seed - 2**64 if seed >= 2**63 else seed
    told = pb.Started(seed=signed, prompt_tokens=prompt_tokens, model=model)
    return pb.GenerateResponse(request_id=request_id, started=told)


def finished(request_id: str, usage: Usage) -> pb.GenerateResponse:
    tokens = pb.Usage(prompt_tokens=usage.prompt, completion_tokens=usage.completion, cached_tokens=usage.cached)
    return pb.GenerateResponse(request_id=request_id, finished=pb.Finished(usage=tokens))


def deltas(request_id: str, delta: OutputDelta, token_text: TokenText) -> Iterator[pb.GenerateResponse]:
    """Yield one response, or several if there are too many log probabilities for one."""
    for part in (delta,) if not (delta.logprobs or delta.prompt_logprobs) else _parts(delta):
        response = pb.GenerateResponse(request_id=request_id)
        message = response.delta
        message.SetInParent()
        message.output_index = part.index
        _set_text(message, part)
        message.token_ids.extend(part.token_ids)
        if part.logprobs:
            message.logprobs.extend(_position(position, token_text) for position in part.logprobs)
        if part.prompt_logprobs:
            message.prompt_logprobs.extend(_position(p, token_text) for p in part.prompt_logprobs if p is not None)
        if part.finish_reason is not None:
            message.finish_reason = _REASONS[part.finish_reason]
            _set_stop_reason(message, part.stop_reason)
            if part.acceptance is not None:
                message.acceptance = part.acceptance
            _set_versions(message, part.weight_versions)
        yield response


def _set_text(message: pb.Delta, part: OutputDelta) -> None:
    message.text = part.text
    if isinstance(part, ParsedDelta):
        message.reasoning = part.reasoning
        for call in part.calls:
            message.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


def _set_stop_reason(message: pb.Delta, reason: int | str | None) -> None:
    if isinstance(reason, str):
        message.stop_string = reason
    elif reason is not None:
        message.stop_token_id = reason


def _set_versions(message: pb.Delta, versions: WeightVersions) -> None:
    message.weight_version = versions[-1][0] if versions else 0
    if len(versions) > 1:
        for version, start, end in version_ranges(versions):
            message.weight_versions.add(version=version, start=start, end=end)


def _parts(delta: OutputDelta) -> Iterator[OutputDelta]:
    """Split a delta by its logprobs: prompt positions, then tokens. Text and finish reason are in the last chunk."""
    prompt = [position for position in delta.prompt_logprobs or () if position is not None]
    for first, end in _ranges(prompt):
        yield OutputDelta(delta.index, "", [], prompt_logprobs=[*prompt[first:end]])
    ranges = _ranges(delta.logprobs)
    for first, end in ranges[:-1]:
        yield OutputDelta(delta.index, "", delta.token_ids[first:end], delta.logprobs[first:end])
    last = ranges[-1][0] if ranges else 0
    yield dataclasses.replace(
        delta, token_ids=delta.token_ids[last:], logprobs=delta.logprobs[last:], prompt_logprobs=None
    )


def _ranges(positions: Sequence[PositionLogprobs]) -> list[tuple[int, int]]:
    if not positions:
        return []
    most = max(1, _MAX_CANDIDATES // max(position.weight for position in positions))
    return [(first, min(first + most, len(positions))) for first in range(0, len(positions), most)]


def _position(position: PositionLogprobs, token_text: TokenText) -> pb.PositionLogprobs:
    top = [_candidate(candidate, token_text) for candidate in position.top]
    message = pb.PositionLogprobs(chosen=_candidate(position.chosen, token_text), top=top)
    if (extras := position.extras) is not None:
        if extras.entropy is not None:
            message.entropy = extras.entropy
        message.token_logprobs.extend(extras.token_logprobs)
        message.kept_token_ids.extend(kept_ids(extras))
        if extras.experts is not None:
            message.routed_experts.layers = extras.experts.layers
            message.routed_experts.ids.extend(array("i", extras.experts.ids))
        if extras.vocabulary is not None:
            message.vocabulary = extras.vocabulary
    return message


def _candidate(candidate: TokenLogprob, token_text: TokenText) -> pb.TokenLogprob:
    token, logprob, rank = candidate
    return pb.TokenLogprob(token_id=token, logprob=logprob, rank=rank, text=token_text(token))


async def tokenized(ids: Sequence[int], max_model_len: int) -> pb.TokenizeResponse:
    """Return the response; many ids are copied in slices by a thread."""
    response = pb.TokenizeResponse(max_model_len=max_model_len)
    if len(ids) <= _CHUNK:
        response.token_ids.extend(ids)
    else:
        await asyncio.to_thread(_extend, response, ids)
    return response


def _extend(response: pb.TokenizeResponse, ids: Sequence[int]) -> None:
    for first in range(0, len(ids), _CHUNK):
        response.token_ids.extend(ids[first : first + _CHUNK])


def scored(results: Sequence[Scored], token_text: TokenText) -> pb.ScoreResponse:
    return pb.ScoreResponse(
        scored=[
            pb.Scored(
                tokens=[_candidate(position.chosen, token_text) for position in result.tokens],
                logprob=result.logprob,
                is_greedy=result.is_greedy,
            )
            for result in results
        ]
    )


def model_info(card: ModelCard, limits: ServeLimits, *, has_tokenizer: bool, has_chat_template: bool) -> pb.ModelInfo:
    info = pb.ModelInfo(
        name=card.name,
        version=importlib.metadata.version("jaxinfer"),
        architecture=card.architecture,
        dtype=card.dtype,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        eos_token_ids=card.eos_token_ids,
        has_tokenizer=has_tokenizer,
        has_chat_template=has_chat_template,
        defaults=_defaults(card),
        limits=_limits(limits),
    )
    info.engine.update({name: _struct_value(value) for name, value in card.engine.items()})
    return info


def _defaults(card: ModelCard) -> pb.SamplingParams:
    """Return the default sampling parameters. Seed, logprobs and max_tokens (it depends on the prompt) are unset."""
    params = SamplingParams(**{**card.defaults, "max_tokens": None})
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return pb.SamplingParams(**{name: value for name, value in values.items() if value is not None})


def _limits(limits: ServeLimits) -> pb.Limits:
    return pb.Limits(
        max_n=limits.n,
        max_logprobs=limits.logprobs,
        max_stop_strings=limits.stop_strings,
        max_stop_characters=limits.stop_characters,
        max_stop_token_ids=limits.stop_token_ids,
        max_bad_words=limits.bad_words,
        max_logit_bias=limits.logit_bias,
        max_prompt_characters=limits.prompt_characters,
        max_message_bytes=limits.message_bytes,
        max_image_bytes=limits.image_bytes,
        max_image_pixels=limits.image_pixels,
        max_vocabulary_bytes=limits.vocabulary_bytes,
    )


def _struct_value(value: Any) -> Any:
    """Convert an engine setting to JSON-like data."""
    if isinstance(value, Mapping):
        return {str(name): _struct_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_struct_value(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
