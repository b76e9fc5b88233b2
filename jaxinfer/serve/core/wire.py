"""Lossless conversion of requests, deltas, statistics and model cards to messages of core.proto and back. No jax."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.engine.scheduling.stats import EngineStats, Histogram
from jaxinfer.kv.manager import KVUsage
from jaxinfer.lora.store import LoadedLoRA
from jaxinfer.lora.usage import LoRAUsage
from jaxinfer.protos.internal import core_pb2 as pb
from jaxinfer.sampling_params import RequestError, SamplingParams, Speculation, StructuredOutputs
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.api.tenants import own_id
from jaxinfer.types import FinishReason, LoRARef, PositionLogprobs, Request, SequenceDelta, Thinking, TokenLogprob

MOST_CANDIDATES = 4096
"""Candidates of prompt log probabilities in one message: some 5 ms to encode it, and again to decode it."""

_LARGE = 2**63
_SAME = (  # fields of `SamplingParams` that have the same type in the message
    "n",
    "temperature",
    "top_p",
    "min_p",
    "top_n_sigma",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "thinking_token_budget",
)
_OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "thinking_token_budget")
_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
    FinishReason.NOT_FINITE: pb.FINISH_REASON_NOT_FINITE,
    FinishReason.UNAVAILABLE: pb.FINISH_REASON_UNAVAILABLE,
}
_REASON_OF = {number: reason for reason, number in _REASONS.items()}
_COUNTERS = (
    "running",
    "compilations",
    "prompt_tokens",
    "generated_tokens",
    "prefix_queries",
    "prefix_hits",
    "drafts",
    "draft_tokens",
    "draft_accepted",
    "replayed_tokens",
    "replay_mismatches",
    "steps",
)
_HISTOGRAMS = ("time_to_first_token", "inter_token_latency", "e2e_latency", "queue_time", "step_time", "lora_load_time")

# ---- requests


def request_message(request: Request, now: float) -> pb.Request:
    """Convert a request to a message. ``now``: current time of the clock of ``request.deadline``.

    Raises:
        RequestError: a number is out of range, or a text is not Unicode.
    """
    left = None if request.deadline is None else request.deadline - now
    try:
        return pb.Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=_sampling_message(request.params),
            stop_token_ids=request.stop_token_ids,
            bad_words_ids=[pb.TokenIds(ids=ids) for ids in request.bad_words_ids],
            priority=request.priority,
            tenant=request.tenant,
            weight=request.weight,
            cache_scope=request.cache_scope,
            cache_salt=request.cache_salt,
            seconds_left=left,
            thinking=None if request.thinking is None else pb.Thinking(**request.thinking._asdict()),
            lora=None if request.lora is None else pb.Lora(**request.lora._asdict()),
        )
    except (ValueError, OverflowError) as error:  # protobuf: number out of range, or text that is not Unicode
        reason = f"request {own_id(request.request_id)!r} cannot be sent to the engine: {error}"
        raise RequestError(None, reason) from error


def request_of(message: pb.Request, now: float) -> Request:
    """Convert a message to a request. ``now``: current time of the clock of its deadline."""
    return Request(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        params=_sampling_of(message.params),
        stop_token_ids=frozenset(message.stop_token_ids),
        bad_words_ids=tuple(tuple(word.ids) for word in message.bad_words_ids),
        priority=message.priority,
        tenant=message.tenant,
        weight=message.weight or 1.0,
        cache_scope=message.cache_scope,
        cache_salt=message.cache_salt,
        deadline=now + message.seconds_left if message.HasField("seconds_left") else None,
        thinking=_thinking_of(message.thinking) if message.HasField("thinking") else None,
        lora=LoRARef(message.lora.name, message.lora.identity) if message.HasField("lora") else None,
    )


def _thinking_of(message: pb.Thinking) -> Thinking:
    return Thinking(message.begin if message.HasField("begin") else None, message.end, message.is_open)


def _sampling_message(params: SamplingParams) -> pb.Sampling:
    fields: dict[str, Any] = {name: getattr(params, name) for name in _SAME}
    message = pb.Sampling(**fields, **seed_fields(params.seed))
    message.top_k = min(params.top_k, 2**64 - 1)  # values beyond any vocabulary mean the same
    if params.logit_bias is not None:
        message.logit_bias.SetInParent()
        message.logit_bias.token_ids.extend(params.logit_bias.keys())
        message.logit_bias.values.extend(params.logit_bias.values())
    for name in ("allowed_token_ids", "stop_token_ids"):
        if (ids := getattr(params, name)) is not None:
            getattr(message, name).CopyFrom(pb.TokenIds(ids=ids))
    if isinstance(params.structured_outputs, StructuredOutputs):
        _set_structured(message.structured_outputs, params.structured_outputs)
    if isinstance(params.speculation, Speculation):
        message.speculation.CopyFrom(pb.Speculation(**dataclasses.asdict(params.speculation)))
    for name in ("bad_words", "stop"):
        if (values := getattr(params, name)) is not None:
            getattr(message, name).CopyFrom(pb.Strings(values=values))
    return message


def _sampling_of(message: pb.Sampling) -> SamplingParams:
    fields = {name: getattr(message, name) for name in _SAME if name not in _OPTIONAL or message.HasField(name)}
    fields |= {name: None for name in _OPTIONAL if not message.HasField(name)}
    bias = message.logit_bias
    return SamplingParams(
        **fields,
        top_k=message.top_k,
        seed=seed_of(message),
        logit_bias=dict(zip(bias.token_ids, bias.values, strict=True)) if message.HasField("logit_bias") else None,
        allowed_token_ids=tuple(message.allowed_token_ids.ids) if message.HasField("allowed_token_ids") else None,
        stop_token_ids=tuple(message.stop_token_ids.ids) if message.HasField("stop_token_ids") else None,
        bad_words=tuple(message.bad_words.values) if message.HasField("bad_words") else None,
        stop=tuple(message.stop.values) if message.HasField("stop") else None,
        speculation=_speculation_of(message.speculation) if message.HasField("speculation") else None,
        structured_outputs=_structured_of(message.structured_outputs),
    )


def _speculation_of(message: pb.Speculation) -> Speculation:
    most = message.max_tokens if message.HasField("max_tokens") else None
    return Speculation(enabled=message.enabled, max_tokens=most, acceptance=message.acceptance)


def _set_structured(message: pb.StructuredOutputs, asked: StructuredOutputs) -> None:
    name, text = asked.asked
    message.enable_in_reasoning = asked.enable_in_reasoning
    if asked.choice is not None:
        message.choice.values.extend(asked.choice)
    else:
        setattr(message, name, True if name == "json_object" else text)


def _structured_of(message: pb.StructuredOutputs) -> StructuredOutputs | None:
    name = message.WhichOneof("asked")
    if name is None:
        return None
    value = getattr(message, name)
    fields: dict[str, Any] = {name: tuple(value.values) if name == "choice" else value}
    return StructuredOutputs(**fields, enable_in_reasoning=message.enable_in_reasoning)


def seed_fields(seed: int | None) -> dict[str, Any]:
    """Return the set field of the oneof ``seeded`` of a message; empty without a seed."""
    if seed is None:
        return {}
    return {"large_seed": seed} if seed >= _LARGE else {"seed": seed}


def seed_of(message: pb.Sampling | pb.Accepted) -> int | None:
    field = message.WhichOneof("seeded")
    return None if field is None else int(getattr(message, field))


# ---- deltas


def deltas_message(numbered: Iterable[tuple[int, SequenceDelta]]) -> pb.Deltas:
    """Convert the deltas of one step, each with its stream's number. Called in the engine thread: it is kept lean."""
    streams: list[int] = []
    indexes: list[int] = []
    tokens: list[int] = []
    others: list[pb.Delta] = []
    for number, delta in numbered:
        ids = delta.token_ids
        if (
            len(ids) == 1
            and delta.finish_reason is None
            and not delta.logprobs
            and delta.cached_tokens is None
            and delta.prompt_logprobs is None
            and not delta.draft_tokens
        ):
            streams.append(number)
            indexes.append(delta.index)
            tokens.append(ids[0])
        else:
            others.append(_delta_message(number, delta))
    return pb.Deltas(streams=streams, indexes=indexes, tokens=tokens, others=others)


def _delta_message(number: int, delta: SequenceDelta) -> pb.Delta:
    message = pb.Delta(
        stream=number,
        index=delta.index,
        token_ids=delta.token_ids,
        finish_reason=_REASONS[delta.finish_reason],
        cached_tokens=delta.cached_tokens,
        draft_tokens=delta.draft_tokens,
        draft_accepted=delta.draft_accepted,
    )
    if delta.logprobs:
        message.logprobs.CopyFrom(_positions_message(delta.logprobs))
    if delta.prompt_logprobs is not None:
        message.prompt_logprobs.CopyFrom(_positions_message(delta.prompt_logprobs))
    if isinstance(delta.stop_reason, str):
        message.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason
    return message


def is_large(delta: SequenceDelta) -> bool:
    """Whether the prompt log probabilities are too many for one message."""
    known = delta.prompt_logprobs
    return known is not None and len(known) > _positions_at_once(known)


def parts(number: int, delta: SequenceDelta) -> Iterator[pb.Deltas]:
    """Yield the prompt log probabilities of a large delta in chunks, except the last one, which stays in the delta. It
    builds messages lazily."""
    known = delta.prompt_logprobs
    assert known is not None
    most = _positions_at_once(known)
    last = (len(known) - 1) // most * most
    for first in range(0, last, most):
        part = _positions_message(known[first : first + most])
        yield pb.Deltas(others=[pb.Delta(stream=number, index=delta.index, prompt_logprobs=part, continues=True)])
    delta.prompt_logprobs = known[last:]


def _positions_at_once(positions: Sequence[PositionLogprobs | None]) -> int:
    widest = positions[-1]  # all positions have the same number; the first token has none
    return MOST_CANDIDATES if widest is None else max(1, MOST_CANDIDATES // (1 + len(widest.top)))


def delta_of(message: pb.Delta, request_id: str) -> SequenceDelta:
    """Convert a message to a delta."""
    stop = message.WhichOneof("stop_reason")
    return SequenceDelta(
        request_id,
        message.index,
        list(message.token_ids),
        logprobs=_known(positions_of(message.logprobs)) if message.HasField("logprobs") else (),
        finish_reason=_REASON_OF[message.finish_reason],
        stop_reason=None if stop is None else getattr(message, stop),
        prompt_logprobs=positions_of(message.prompt_logprobs) if message.HasField("prompt_logprobs") else None,
        cached_tokens=message.cached_tokens if message.HasField("cached_tokens") else None,
        draft_tokens=message.draft_tokens,
        draft_accepted=message.draft_accepted,
    )


def _positions_message(positions: Sequence[PositionLogprobs | None]) -> pb.Positions:
    candidates = [c for position in positions if position is not None for c in (position.chosen, *position.top)]
    return pb.Positions(
        tops=[-1 if position is None else len(position.top) for position in positions],
        token_ids=[c.token_id for c in candidates],
        logprobs=[c.logprob for c in candidates],
        ranks=[c.rank for c in candidates],
    )


def positions_of(message: pb.Positions) -> list[PositionLogprobs | None]:
    candidates = map(TokenLogprob, message.token_ids, message.logprobs, message.ranks)
    return [
        None if top < 0 else PositionLogprobs(next(candidates), tuple(next(candidates) for _ in range(top)))
        for top in message.tops
    ]


def _known(positions: list[PositionLogprobs | None]) -> list[PositionLogprobs]:
    return [position for position in positions if position is not None]


# ---- statistics


def stats_message(stats: EngineStats) -> pb.Stats:
    return pb.Stats(
        **{name: getattr(stats, name) for name in _COUNTERS},
        **{name: _histogram_message(getattr(stats, name)) for name in _HISTOGRAMS},
        waiting=stats.waiting,
        finished={reason.value: count for reason, count in stats.finished.items()},
        preemptions=stats.preemptions,
        draft_accepted_at=stats.draft_accepted_at,
        kv=None if stats.kv is None else pb.Usage(**dataclasses.asdict(stats.kv)),
        loras=None if stats.loras is None else pb.LoraUsage(**dataclasses.asdict(stats.loras)),
    )


def stats_of(message: pb.Stats) -> EngineStats:
    kv = message.kv
    fields: dict[str, Any] = {name: getattr(message, name) for name in _COUNTERS}
    fields |= {name: _histogram_of(getattr(message, name)) for name in _HISTOGRAMS}
    return EngineStats(
        **fields,
        waiting=dict(message.waiting),
        finished={FinishReason(reason): count for reason, count in message.finished.items()},
        preemptions=dict(message.preemptions),
        draft_accepted_at=tuple(message.draft_accepted_at),
        kv=KVUsage(**{field.name: getattr(kv, field.name) for field in dataclasses.fields(KVUsage)})
        if message.HasField("kv")
        else None,
        loras=_lora_usage_of(message.loras) if message.HasField("loras") else None,
    )


def _lora_usage_of(message: pb.LoraUsage) -> LoRAUsage:
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(LoRAUsage)}
    return LoRAUsage(**{**fields, "running": dict(message.running), "waiting": dict(message.waiting)})


def _histogram_message(histogram: Histogram) -> pb.Histogram:
    return pb.Histogram(bounds=histogram.bounds, counts=histogram.counts, sum=histogram.sum)


def _histogram_of(message: pb.Histogram) -> Histogram:
    return Histogram(tuple(message.bounds), tuple(message.counts), message.sum)


# ---- adapters


def lora_of(message: pb.LoadedLora) -> LoadedLoRA:
    return LoadedLoRA(message.name, message.path, message.identity, message.rank)


# ---- the model


def card_message(card: ModelCard) -> pb.Card:
    """Convert a model card; tuples among the settings become lists.

    Raises:
        TypeError: a setting is not JSON-like.
    """
    fields = {field.name: getattr(card, field.name) for field in dataclasses.fields(card)}
    return pb.Card(**{**fields, "defaults": _json(card.defaults), "engine": _json(card.engine)})


def card_of(message: pb.Card) -> ModelCard:
    fields: dict[str, Any] = {field.name: getattr(message, field.name) for field in dataclasses.fields(ModelCard)}
    settings = {name: json.loads(fields[name]) for name in ("defaults", "engine")}
    return ModelCard(**{**fields, **settings, "eos_token_ids": list(message.eos_token_ids)})


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(dict(settings))
