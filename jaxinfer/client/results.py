"""Result records of the client, independent of protobuf."""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from jaxinfer.brief import ShortRepr
from jaxinfer.client.errors import ServerError, Truncated
from jaxinfer.client.messages import ToolCall
from jaxinfer.protos.v1 import inference_pb2 as pb

_FINISH_REASONS: Mapping[int, str] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class Health(enum.Enum):
    """Status of grpc.health.v1. ``SERVICE_UNKNOWN``: this server does not know the service."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the natural log of its probability under the raw logits, its rank from 1, and its text."""

    token_id: int
    logprob: float
    rank: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token at one position, and the most likely ones, most likely first.

    Attributes:
        entropy: in nats, if requested.
        token_logprobs: of the request's ``logprob_token_ids``.
        kept_token_ids: token ids that the sampler could draw, if requested.
        routed_experts: experts that the forward pass took, for each layer that has any, if requested.
        vocabulary: under ``logprobs=-1``: those of the whole vocabulary by token id, an `array` of float32.
    """

    chosen: TokenLogprob
    top: Sequence[TokenLogprob]
    entropy: float | None = None
    token_logprobs: Sequence[float] = ()
    kept_token_ids: Sequence[int] = ()
    routed_experts: Sequence[Sequence[int]] = ()
    vocabulary: Sequence[float] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Delta of one tool call. ``index``: index of the call in its output. ``id`` and ``name``: in its first delta."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one output.

    Attributes:
        index: index of the output: 0 to n-1.
        text: complete characters; may be empty.
        logprobs: one for each of ``token_ids``, if requested.
        finish_reason: in an output's last delta: "stop", "length", "abort" or, under ``parse``, "tool_calls".
        stop_reason: under "stop", the request's own stop token or stop string that ended it.
        prompt_logprobs: in output 0's first delta, if requested: of each prompt token except the first. Those of a long
            prompt continue in the next deltas, which have no tokens before the last of them.
        acceptance: in an output's last delta: "typical" where drafts were accepted by that rule; None: exact.
        weight_version: in an output's last delta: version of the weights that computed its last token.
        weight_versions: in an output's last delta, if it has several: (version, start, end) of its tokens.
        reasoning, tool_calls: under ``parse``: deltas of the reasoning, and of the calls.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    acceptance: str | None = None
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()
    weight_version: int | None = None
    weight_versions: Sequence[tuple[int, int, int]] = ()


@dataclasses.dataclass(frozen=True)
class Usage:
    """Token counts. ``completion_tokens``: of all outputs; ``cached_tokens``: found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclasses.dataclass(repr=False)
class Output(ShortRepr):
    """Output of a request, one of ``n``: its deltas combined. ``finish_reason`` None: the stream has not ended.
    ``acceptance`` is "typical" where drafts were accepted by that rule, which changes tokens; None: exact. Under
    ``parse`` ``text`` is content, without reasoning and calls. ``weight_version``: version of the weights that computed
    the last token; ``weight_versions``: if there are several, (version, start, end) of the tokens of each."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[PositionLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    acceptance: str | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)
    weight_version: int | None = None
    weight_versions: Sequence[tuple[int, int, int]] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The output as a message for the next request of the conversation."""
        parts = {"reasoning": self.reasoning, "tool_calls": list(self.tool_calls)}
        found = {name: value for name, value in parts.items() if value}
        return {"role": "assistant", "content": self.text if self.text or not found else None, **found}


@dataclasses.dataclass(frozen=True, repr=False)
class Completion(ShortRepr):
    """A complete answer. ``text``, ``token_ids``, ``message`` and so on are those of the first output.

    Attributes:
        seed: the one used, drawn by the server if none was given.
        model: name of the model that answered: the served model, or an adapter.
    """

    request_id: str
    seed: int
    outputs: Sequence[Output]
    usage: Usage
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    model: str = ""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> Sequence[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        return self.outputs[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        return self.outputs[0].message


@dataclasses.dataclass(frozen=True)
class BatchItem:
    """Result of one prompt of a batch: a completion or an error.

    Attributes:
        index: index of the prompt, from 0, in the order in which the prompts were given.
    """

    index: int
    completion: Completion | None = None
    error: ServerError | None = None

    def result(self) -> Completion:
        """Return the completion.

        Raises:
            ServerError: this prompt's error.
        """
        if self.completion is None:
            raise self.error or ServerError("the prompt has no answer")
        return self.completion


@dataclasses.dataclass(frozen=True, repr=False)
class Scored(ShortRepr):
    """Score of a continuation: tokens, the sum of their log probabilities, and whether each is the most likely one."""

    tokens: Sequence[TokenLogprob]
    logprob: float
    is_greedy: bool


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Description of the served model.

    Attributes:
        defaults: values of unset sampling fields, by name.
        limits: bounds on one request, by name.
        engine: the engine's resolved settings, by name.
    """

    name: str
    version: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: Sequence[int]
    has_tokenizer: bool
    has_chat_template: bool
    defaults: Mapping[str, Any]
    limits: Mapping[str, int]
    engine: Mapping[str, Any]


class _Parts:
    """Text deltas of one output, joined once."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[ToolCallDelta, list[str]]] = {}

    def add(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            self._calls.setdefault(call.index, (call, []))[1].append(call.arguments)

    def put_into(self, output: Output) -> None:
        output.text, output.reasoning = "".join(self._text), "".join(self._reasoning)
        calls = (self._calls[index] for index in sorted(self._calls))
        output.tool_calls = [ToolCall(first.id or "", first.name or "", "".join(parts)) for first, parts in calls]


class Answer:
    """Assembler of the responses to one request."""

    def __init__(self) -> None:
        self.request_id = self.model = ""
        self.seed: int | None = None
        self.prompt_tokens: int | None = None
        self.usage: Usage | None = None
        self.outputs: list[Output] = []
        self._parts: list[_Parts] = []
        self._prompt_logprobs: list[PositionLogprobs] = []

    def take(self, response: pb.GenerateResponse) -> Delta | None:
        """Take a response; return its delta, if it has one."""
        match response.WhichOneof("event"):
            case "delta":
                return self._add(read_delta(response.delta))
            case "started":
                self.request_id = response.request_id
                self.seed, self.prompt_tokens = response.started.seed, response.started.prompt_tokens
                self.model = response.started.model
            case "finished":
                usage = response.finished.usage
                self.usage = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        return None

    def completion(self) -> Completion:
        """Return the complete answer.

        Raises:
            Truncated: the stream has not reached its end.
        """
        ended = bool(self.outputs) and all(output.finish_reason is not None for output in self.outputs)
        if self.usage is None or self.seed is None or not ended:
            raise Truncated(f"the stream of request {self.request_id!r} ended before the answer did")
        for output, parts in zip(self.outputs, self._parts, strict=True):
            parts.put_into(output)
        return Completion(self.request_id, self.seed, self.outputs, self.usage, self._prompt_logprobs, self.model)

    def _add(self, delta: Delta) -> Delta:
        while len(self.outputs) <= delta.index:
            self.outputs.append(Output())
            self._parts.append(_Parts())
        output = self.outputs[delta.index]
        self._parts[delta.index].add(delta)
        output.token_ids += delta.token_ids
        output.logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            output.acceptance = delta.acceptance
            output.weight_version, output.weight_versions = delta.weight_version, delta.weight_versions
        return delta


def read_delta(delta: pb.Delta) -> Delta:
    stop = delta.WhichOneof("stop_reason")
    return Delta(
        delta.output_index,
        delta.text,
        list(delta.token_ids),
        [_read_position(position) for position in delta.logprobs] if delta.logprobs else (),
        _FINISH_REASONS.get(delta.finish_reason, "unknown") if delta.HasField("finish_reason") else None,
        getattr(delta, stop) if stop else None,
        [_read_position(position) for position in delta.prompt_logprobs] if delta.prompt_logprobs else (),
        delta.acceptance if delta.HasField("acceptance") else None,
        delta.reasoning,
        [_read_call(call) for call in delta.tool_calls] if delta.tool_calls else (),
        delta.weight_version if delta.HasField("weight_version") else None,
        [(each.version, each.start, each.end) for each in delta.weight_versions] if delta.weight_versions else (),
    )


def read_scored(scored: pb.Scored) -> Scored:
    return Scored([_read_token(token) for token in scored.tokens], scored.logprob, scored.is_greedy)


def read_model_info(info: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        info.name,
        info.version,
        info.architecture,
        info.dtype,
        info.max_model_len,
        info.vocab_size,
        list(info.eos_token_ids),
        info.has_tokenizer,
        info.has_chat_template,
        defaults={field.name: _plain(value) for field, value in info.defaults.ListFields()},
        limits={field.name: getattr(info.limits, field.name) for field in info.limits.DESCRIPTOR.fields},
        engine=json_format.MessageToDict(info.engine),
    )


def _read_call(call: pb.ToolCallDelta) -> ToolCallDelta:
    name_id, name = (getattr(call, field) if call.HasField(field) else None for field in ("id", "name"))
    return ToolCallDelta(call.index, name_id, name, call.arguments)


def _plain(value: Any) -> Any:
    if isinstance(value, pb.TokenIds):
        return list(value.ids)
    if isinstance(value, Message):
        return json_format.MessageToDict(value)
    if isinstance(value, int | float | str):
        return value
    return dict(value) if isinstance(value, Mapping) else list(value)


def _read_position(position: pb.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        _read_token(position.chosen),
        [_read_token(token) for token in position.top],
        position.entropy if position.HasField("entropy") else None,
        tuple(position.token_logprobs),
        tuple(position.kept_token_ids),
        _read_experts(position.routed_experts),
        array("f", position.vocabulary) if position.vocabulary else (),
    )


def _read_experts(routed: pb.RoutedExperts) -> Sequence[Sequence[int]]:
    ids, top = tuple(routed.ids), len(routed.ids) // max(1, routed.layers)
    return tuple(ids[first : first + top] for first in range(0, len(ids), top)) if ids else ()


def _read_token(token: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.token_id, token.logprob, token.rank, token.text)
