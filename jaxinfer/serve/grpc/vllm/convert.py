"""Conversion of a GenerateRequest of `vllm.grpc.engine` to a `Call`: each field is mapped or rejected by name.

As in vLLM, non-optional numbers count as unset if they are 0, and unset fields have vLLM's defaults, not the model's:
routers fill in the model's defaults themselves (``default_sampling_params_json``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

from jaxinfer.serve.api.errors import Kind, ServeError, invalid, prompt_as
from jaxinfer.serve.api.requests import Call, Input
from jaxinfer.serve.grpc.vllm import messages

REFUSED: Mapping[str, str] = {
    "mm_inputs": "pixels that another program has prepared are not taken: send images to Inference or HTTP",
    "extra_mm_inputs": "pixels that another program has prepared are not taken: send images to Inference or HTTP",
    "media_refs": "send images to Inference or HTTP",
    "kv_transfer_params": "there are no transfers of cached pages between engines",
    "kv_transfer_params_json": "there are no transfers of cached pages between engines",
}
"""Request fields that are not served, and the reasons."""

WITHOUT_EFFECT = frozenset({"spaces_between_special_tokens"})
"""Sampling fields that only affect text, which this service does not send."""

REQUEST_FIELDS = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"})
"""Request fields that are served; all other fields are in `REFUSED`."""

CONSTRAINTS: Mapping[str, str] = {
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
    "choice": "choice",
}
"""Fields of a constraint, and their names in `StructuredOutputs`."""

_PLAIN = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens"),
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
)
_ZERO_IS_ONE = ("n", "top_p", "repetition_penalty")
_OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
_MANY = ("stop", "stop_token_ids", "logit_bias")

SAMPLING_FIELDS = frozenset(
    {*_PLAIN, *_ZERO_IS_ONE, *_OPTIONAL, *_MANY, *CONSTRAINTS}
    | {"temperature", "truncate_prompt_tokens", "grammar_from_first_token"}
)
"""Sampling fields that have an effect."""

_CHUNK = 4096


def call_of(
    request: messages.pb.GenerateRequest,
    *,
    replicas: int = 1,
    timeout: float | None = None,
    tenant: str = "",
    trace: Mapping[str, str] | None = None,
) -> Call:
    """Convert a client's request to a call, except truncation (`truncation_of`).

    Args:
        replicas: number of replicas of the engine.

    Raises:
        ServeError: INVALID: the input is missing, or a field is not served.
    """
    _check_fields(request)
    _check_rank(request, replicas)
    return Call(
        prompt=_input_of(request),
        sampling=sampling_of(request.sampling_params),
        request_id=request.request_id or None,
        timeout=timeout,
        tenant=tenant,
        trace=trace or {},
    )


def _check_fields(request: messages.pb.GenerateRequest) -> None:
    for name in _set(request):
        if name not in REQUEST_FIELDS:
            raise _not_served(name, REFUSED.get(name, "this server does not know it"))
    for name in _set(request.sampling_params):
        if name not in SAMPLING_FIELDS | WITHOUT_EFFECT:
            raise _not_served(f"sampling_params.{name}", "this server does not know it")
    if request.sampling_params.HasField("logprobs") and request.sampling_params.logprobs == -1:
        raise _not_served("logprobs=-1", "jaxinfer.v1.Inference has a field for a whole vocabulary", "logprobs")


def _set(message: Any) -> Iterator[str]:
    """Yield the names of the fields that are set, including fields unknown to the installed message package."""
    yield from (field.name for field, _ in message.ListFields())
    yield from (f"field {unknown.field_number}" for unknown in messages.unknown_fields(message))


def _not_served(name: str, why: str, field: str | None = None) -> ServeError:
    return ServeError(Kind.INVALID, f"{name} is not served: {why}", field or name)


def _check_rank(request: messages.pb.GenerateRequest, replicas: int) -> None:
    rank = request.data_parallel_rank
    if request.HasField("data_parallel_rank") and (rank != 0 or replicas != 1):
        chosen = f"is not served: the server chooses among its {replicas} replicas"
        raise invalid("data_parallel_rank", rank, "must be 0: there is one replica" if replicas == 1 else chosen)


def _input_of(request: messages.pb.GenerateRequest) -> Input:
    match request.WhichOneof("input"):
        case "tokenized":
            ids: Sequence[int] = request.tokenized.input_ids  # not copied yet: the validator checks the length first
            return ids
        case "text":
            text: str = request.text
            return text
        case _:
            raise ServeError(Kind.INVALID, "input is not set: give one of tokenized, text", field="input")


def names_of(request: messages.pb.GenerateRequest) -> dict[str, str]:
    """Map the front end's fields to their names in this request, see `rename_fields`."""
    named = "text" if request.WhichOneof("input") == "text" else "tokenized.input_ids"
    asked = request.sampling_params.WhichOneof("constraint") or "constraint"
    outputs = {f"structured_outputs.{ours}": theirs for theirs, ours in CONSTRAINTS.items()}
    return {**prompt_as(named), "structured_outputs": asked, **outputs}


def sampling_of(message: messages.pb.SamplingParams) -> dict[str, Any]:
    """Return the fields of `SamplingParams`, as vLLM interprets the message. Long lists and maps are not copied."""
    found: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN}
    found |= {name: getattr(message, name) or 1 for name in _ZERO_IS_ONE}
    found["temperature"] = message.temperature if message.HasField("temperature") else 1.0
    found |= {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    found |= {name: _few(getattr(message, name)) for name in _MANY if getattr(message, name)}
    if (asked := message.WhichOneof("constraint")) is not None:
        found["structured_outputs"] = _constraint(message, asked)
    return found


def _constraint(message: messages.pb.SamplingParams, asked: str) -> dict[str, Any]:
    value = getattr(message, asked)
    value = list(value.choices) if asked == "choice" else value
    if asked == "json_object" and not value:
        raise invalid("json_object", value, "must be true, or left out")
    return {CONSTRAINTS[asked]: value, "enable_in_reasoning": message.grammar_from_first_token}


def _few(items: Any) -> Sized:
    """Return a copy of a short list or map; a long one is returned uncopied."""
    if len(items) > _CHUNK:  # the validator checks the length before it copies
        return items
    return dict(items) if isinstance(items, Mapping) else list(items)


def truncation_of(message: messages.pb.SamplingParams, max_model_len: int) -> int | None:
    """Return how many of the last prompt tokens are kept; None: all. -1 leaves capacity for the output.

    Raises:
        ServeError: INVALID: the number is out of range.
    """
    if not message.HasField("truncate_prompt_tokens"):
        return None
    asked: int = message.truncate_prompt_tokens
    if asked == 0 or not -1 <= asked <= max_model_len:
        raise invalid("truncate_prompt_tokens", asked, f"must be from 1 to {max_model_len} (max_model_len), or -1")
    return asked if asked > 0 else max(1, max_model_len - max(1, message.max_tokens))
