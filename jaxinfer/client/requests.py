"""Conversion of the client's keyword arguments to request messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jaxinfer.client.fields import extend, guarded, set_field, set_struct
from jaxinfer.client.messages import ChatMessage, set_choice, set_message
from jaxinfer.protos.v1 import inference_pb2 as pb

_AS_JSON = ("json", "structural_tag")
Prompt = str | Sequence[int] | Sequence[ChatMessage]


class ModelOption(TypedDict, total=False):
    """Option of every call. ``model``: default is the served one; another name raises `NotFound`."""

    model: str | None


class ChatOptions(TypedDict, total=False):
    """Options used with ``messages``, for the chat template. ``template``: replaces the model's template.

    ``tool_choice``: "auto", "none", "required" or an object that names functions, in OpenAI's format.
    ``reasoning_effort``: amount of reasoning, with OpenAI's values.
    """

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    template_variables: Mapping[str, Any] | None
    template: str | None
    tool_choice: str | Mapping[str, Any] | None
    reasoning_effort: str | None


class AnswerOptions(TypedDict, total=False):
    """Options used with ``messages``, for the answer.

    ``parse``: separate reasoning and tool calls from content; not given: ``text`` is the raw model output. It is
    required by ``parallel_tool_calls`` (false: at most one call) and ``include_reasoning`` (false: drop the reasoning).
    """

    parse: bool | None
    parallel_tool_calls: bool | None
    include_reasoning: bool | None


class SamplingOptions(TypedDict, total=False):
    """Options of sampling and stopping. None or not given: the server's default, see `Client.model_info`.

    ``speculation``: ``enabled``, ``max_tokens`` and ``acceptance`` by name (docs/speculation.md).
    ``structured_outputs``: one of ``json`` (a schema, as an object or as text), ``json_object``, ``regex``, ``choice``,
    ``grammar`` and ``structural_tag`` (an object or text) by name (docs/structured_outputs.md).
    """

    n: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    top_n_sigma: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    forced_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    logprobs_mode: str | None
    logprob_token_ids: Sequence[int] | None
    return_entropy: bool | None
    return_sampling_mask: bool | None
    return_routed_experts: bool | None
    skip_special_tokens: bool | None
    speculation: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    thinking_token_budget: int | None


class LoraOption(TypedDict, total=False):
    """Option of generation and scoring. ``lora_name``: LoRA adapter to use; an unknown one raises `NotFound`."""

    lora_name: str | None


class GenerateOptions(ModelOption, LoraOption, ChatOptions, AnswerOptions, SamplingOptions, total=False):
    """Keyword arguments of a generation.

    ``request_id``: default is one made by the server. ``priority``: lower is served earlier. ``cache_salt``: requests
    of different salts never share cached prompts, nor do tenants. ``add_special_tokens``: whether a text prompt gets
    BOS.
    """

    request_id: str | None
    priority: int | None
    cache_salt: str | None
    add_special_tokens: bool | None


class TokenizeOptions(ModelOption, ChatOptions, total=False):
    """Keyword arguments of `Client.tokenize`."""

    add_special_tokens: bool | None


class ScoreOptions(ModelOption, LoraOption, ChatOptions, total=False):
    """Keyword arguments of `Client.score`."""

    add_special_tokens: bool | None


_CHAT = ChatOptions.__annotations__.keys() | AnswerOptions.__annotations__.keys()
_SAMPLING = SamplingOptions.__annotations__.keys()


def generate_request(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Sequence[ChatMessage] | None,
    options: Mapping[str, Any],
) -> pb.GenerateRequest:
    """Build the message.

    Raises:
        TypeError: not exactly one input, or an unknown option.
        ValueError: a value that the message cannot carry; the sentence names it.
    """
    values = _checked(options, GenerateOptions)
    request = pb.GenerateRequest()
    _set_input(request, prompt, token_ids, messages, values)
    for name in values.keys() & _SAMPLING:
        _set_sampling(request.sampling, name, values.pop(name))
    _set_fields(request, values)
    return request


def batch_prefix(options: Mapping[str, Any]) -> str:
    """Return the prefix of the request ids of a batch."""
    return options.get("request_id") or uuid.uuid4().hex


def batch_id(prefix: str, index: int) -> str:
    return f"{prefix}-{index}"


def batch_request(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Build the request for one prompt of a batch: text, token ids or messages."""
    if isinstance(prompt, str):
        return generate_request(prompt, None, None, options)
    if prompt and isinstance(prompt[0], Mapping):
        return generate_request(None, None, prompt, options)  # type: ignore[arg-type]
    return generate_request(None, prompt, None, options)  # type: ignore[arg-type]


def tokenize_request(
    text: str | None, messages: Sequence[ChatMessage] | None, options: Mapping[str, Any]
) -> pb.TokenizeRequest:
    values = _checked(options, TokenizeOptions)
    request = pb.TokenizeRequest()
    _set_input(request, text, None, messages, values, text_field="text")
    _set_fields(request, values)
    return request


def detokenize_request(
    token_ids: Sequence[int], skip_special_tokens: bool | None, model: str | None
) -> pb.DetokenizeRequest:
    request = pb.DetokenizeRequest(model=model)
    if skip_special_tokens is not None:
        request.skip_special_tokens = skip_special_tokens
    extend("token_ids", request.token_ids, token_ids)
    return request


def score_request(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Sequence[ChatMessage] | None,
    continuations: Sequence[str | Sequence[int]],
    options: Mapping[str, Any],
) -> pb.ScoreRequest:
    values = _checked(options, ScoreOptions)
    request = pb.ScoreRequest()
    _set_input(request, prompt, token_ids, messages, values)
    for continuation in continuations:
        item = request.continuations.add()
        if isinstance(continuation, str):
            set_field(item, "text", continuation)
        else:
            item.token_ids.SetInParent()
            extend("continuations", item.token_ids.ids, continuation)
    _set_fields(request, values)
    return request


def _checked(options: Mapping[str, Any], known: type) -> dict[str, Any]:
    """Return the options that have a value; unknown ones raise a TypeError, as for any keyword argument."""
    if unknown := options.keys() - known.__annotations__.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    return {name: value for name, value in options.items() if value is not None}


def _set_input(
    request: Any,
    text: str | None,
    token_ids: Sequence[int] | None,
    messages: Sequence[ChatMessage] | None,
    options: dict[str, Any],
    text_field: str = "prompt",
) -> None:
    if sum(value is not None for value in (text, token_ids, messages)) != 1:
        raise TypeError(f"give one of {text_field}, token_ids and messages")
    chat = {name: options.pop(name) for name in options.keys() & _CHAT}
    if messages is not None:
        _set_chat(request.chat, messages, chat)
    elif chat:
        raise TypeError(f"{min(chat)} goes with messages only")
    elif text is not None:
        set_field(request, text_field, text)
    elif token_ids is not None:
        request.token_ids.SetInParent()
        extend("token_ids", request.token_ids.ids, token_ids)


def _set_chat(chat: pb.Chat, messages: Sequence[ChatMessage], options: dict[str, Any]) -> None:
    chat.SetInParent()
    for message in messages:
        set_message(chat.messages.add(), message)
    for tool in options.pop("tools", ()):
        set_struct("tools", chat.tools.add(), tool)
    if "template_variables" in options:
        set_struct("template_variables", chat.template_variables, options.pop("template_variables"))
    if "tool_choice" in options:
        set_choice(chat.tool_choice, options.pop("tool_choice"))
    _set_fields(chat, options)


def _set_sampling(sampling: pb.SamplingParams, name: str, value: Any) -> None:
    if name == "logit_bias":
        for token, bias in value.items():
            guarded(name, value, sampling.logit_bias.__setitem__, token, bias)
    elif name in ("allowed_token_ids", "forced_token_ids", "logprob_token_ids"):
        message = getattr(sampling, name)
        message.SetInParent()  # an empty list is not the same as none
        extend(name, message.ids, value)
    elif name == "speculation":
        _set_named("speculation", sampling.speculation, value)
    elif name == "structured_outputs":
        _set_named("structured_outputs", sampling.structured_outputs, value)
    elif name in ("stop", "bad_words", "stop_token_ids"):
        extend(name, getattr(sampling, name), [value] if isinstance(value, str) and name == "stop" else value)
    else:
        set_field(sampling, name, value)


def _set_named(field: str, message: Any, fields: Any) -> None:
    if not isinstance(fields, Mapping):
        raise ValueError(f"{field}={fields!r:.100} must be a mapping")
    message.SetInParent()
    known = message.DESCRIPTOR.fields_by_name
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"{field}.{name!s:.50} is no field of it: they are {', '.join(known)}")
        if name == "choice" and value is not None:
            extend(f"{field}.{name}", message.choice, value)
        elif value is not None:
            text = json.dumps(value) if name in _AS_JSON and isinstance(value, Mapping) else value
            guarded(f"{field}.{name}", value, setattr, message, name, text)


def _set_fields(message: Any, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        set_field(message, name, value)
