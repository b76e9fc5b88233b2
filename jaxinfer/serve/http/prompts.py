"""Conversion of request bodies to prompts and sampling parameters for the front end."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.serve.api.errors import Kind, ServeError, invalid, prompt_as, short
from jaxinfer.serve.api.requests import Conversation, ServeLimits
from jaxinfer.serve.frontend.chat.messages import for_template, message_at
from jaxinfer.serve.frontend.chat.terms import ChatTerms
from jaxinfer.serve.http.requests import ChatCompletionRequest, CompletionRequest, Sampling, TokenizeRequest

MAX_PROMPTS = 1024
"""Maximum number of prompts of one completion request."""
_FEW = 256


def prompts_of(body: CompletionRequest, limits: ServeLimits) -> list[str | Sequence[int]]:
    """Return the prompts, each as text or token ids. ``prompt`` may be one prompt or a list; the limit on prompt
    characters applies to all texts together.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    prompt = body.prompt
    if isinstance(prompt, str | array):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        _refuse("prompt", prompt, "must be text, token ids, or a list of either")
    if not isinstance(prompt[0], str | list | array):
        return [ids_of("prompt", prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise ServeError(Kind.INVALID, f"prompt must hold at most {MAX_PROMPTS} prompts, not {len(prompt)}", "prompt")
    characters = sum(len(item) for item in prompt if isinstance(item, str))
    if characters > limits.prompt_characters:
        most = f"must have at most {limits.prompt_characters} characters"
        raise ServeError(Kind.INVALID, f"prompt {most}, not {characters}", "prompt")
    return [item if isinstance(item, str) else ids_of(f"prompt[{i}]", item) for i, item in enumerate(prompt)]


def sampling_of_completion(body: CompletionRequest, limits: ServeLimits) -> dict[str, Any]:
    """Return the sampling fields for the validator. ``echo`` with ``logprobs`` also requests prompt logprobs; with
    ``max_tokens`` 0 it only scores the prompt: one token is generated and not shown.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    fields = body.sampling(limits.logit_bias)
    if body.best_of is not None and body.best_of != fields.get("n", 1):
        _refuse("best_of", body.best_of, "is not served unless it is n")
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if body.logprobs == -1 and (body.echo or _several(body)):
            _refuse("logprobs", -1, "takes one prompt, without echo")
        if body.echo:
            fields["prompt_logprobs"] = body.logprobs
    if scores_only(body):
        fields["max_tokens"] = 1
    return fields


def scores_only(body: CompletionRequest) -> bool:
    """Whether the request only scores the prompt and shows no output."""
    return bool(body.echo) and body.max_tokens == 0 and not isinstance(body.max_tokens, bool)


def terms_of(body: ChatCompletionRequest) -> ChatTerms:
    """Return the fields of ``body`` that describe the answer (tools, reasoning, continued text)."""
    last = f"messages[{len(body.messages) - 1}]"
    begun = _message(last, body.messages[-1]).get("content") or "" if body.continue_final_message else None
    begun = "" if isinstance(begun, list) else begun  # it is rejected with its conversation
    return ChatTerms(body.tools, body.tool_choice, body.parallel_tool_calls, body.include_reasoning, begun)


def sampling_of_chat(body: ChatCompletionRequest, limits: ServeLimits) -> dict[str, Any]:
    """Return the sampling fields for the validator, before tool constraints are added.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    fields = body.sampling(limits.logit_bias)
    if body.max_completion_tokens is not None:
        if fields.get("max_tokens", body.max_completion_tokens) != body.max_completion_tokens:
            _refuse("max_tokens", body.max_tokens, f"must be max_completion_tokens={short(body.max_completion_tokens)}")
        fields["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        fields["logprobs"] = 0 if body.top_logprobs is None else body.top_logprobs
    elif body.top_logprobs:
        _refuse("top_logprobs", body.top_logprobs, "needs logprobs=true")
    return fields


def names_in_chat(body: ChatCompletionRequest) -> Mapping[str, str]:
    """Map the validator's field names to their names in ``body``, where they differ."""
    names = {**names_in_messages(), **names_in_format(body), "logprobs": "top_logprobs"}
    return names if body.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}


def names_in_messages() -> dict[str, str]:
    """Map the validator's field names of a conversation to the request's names."""
    return {**prompt_as("messages"), "template": "chat_template", "variables": "chat_template_kwargs"}


def names_in_format(body: Sampling) -> dict[str, str]:
    """Map the validator's field name of the output constraint to its name in ``body``."""
    if body.structured_outputs is not None:
        return {}
    if body.guided:
        return {"structured_outputs": next(iter(body.guided))}
    by_tools = isinstance(body, ChatCompletionRequest) and body.tools and body.response_format is None
    return {"structured_outputs": "tools" if by_tools else "response_format"}


def names_in_prompts(body: CompletionRequest) -> list[dict[str, str]]:
    """Map the validator's field names to the request's names, for each prompt of ``body``."""
    prompts = [f"prompt[{i}]" for i in range(len(body.prompt))] if _several(body) else ["prompt"]
    return [{**prompt_as(each), **names_in_format(body)} for each in prompts]


def _several(body: CompletionRequest) -> bool:
    return isinstance(body.prompt, list) and isinstance(body.prompt[0], str | list | array)


async def conversation_of(body: ChatCompletionRequest | TokenizeRequest, limits: ServeLimits) -> Conversation:
    """Return the conversation with its contents read, see `_conversation`; long ones use a thread.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    messages = body.messages or ()
    if len(messages) > limits.messages:
        raise ServeError(
            Kind.INVALID, f"messages must be at most {limits.messages}, not {len(messages)}", field="messages"
        )
    parts = sum(len(found) for each in messages if isinstance(found := each.get("content"), list))
    if len(messages) + parts <= _FEW:
        return _conversation(body)
    return await asyncio.to_thread(_conversation, body)


def _conversation(body: ChatCompletionRequest | TokenizeRequest) -> Conversation:
    """Return the conversation with its contents read: text, or text and images. ``tool_choice`` "none" hides tools from
    the template.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    messages = [_message(f"messages[{i}]", message) for i, message in enumerate(body.messages or ())]
    if body.continue_final_message:
        _check_continued(body, messages)
    generate = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    options = body.mm_processor_kwargs
    return Conversation(
        messages=messages,
        tools=terms_of(body).shown_tools if isinstance(body, ChatCompletionRequest) else body.tools,
        add_generation_prompt=generate,
        variables=body.chat_template_kwargs or {},
        template=body.chat_template,
        reasoning_effort=body.reasoning_effort if isinstance(body, ChatCompletionRequest) else None,
        continue_final_message=bool(body.continue_final_message),
        image_options={} if options is None else options.model_dump(exclude_none=True),
    )


def _check_continued(body: ChatCompletionRequest | TokenizeRequest, messages: Sequence[Mapping[str, Any]]) -> None:
    if body.add_generation_prompt:
        _refuse("continue_final_message", True, "and add_generation_prompt=true exclude each other")
    last, place = messages[-1] if messages else {}, f"messages[{len(messages) - 1}]"
    if last.get("role") != "assistant":
        _refuse(f"{place}.role", last.get("role"), "must be assistant: its message is to be continued")
    if isinstance(last.get("content"), list):
        raise ServeError(Kind.INVALID, f"{place}.content has images, and cannot be continued", f"{place}.content")
    if last.get("tool_calls"):
        _refuse(f"{place}.tool_calls", last["tool_calls"], "cannot be continued: what they have returned is missing")


def _message(path: str, message: Mapping[str, Any]) -> dict[str, Any]:
    return for_template(message_at(path, message))


def ids_of(field: str, ids: Any) -> Sequence[int]:
    """Return token ids as a list, or as the array into which a long list was parsed.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    if isinstance(ids, array):
        return ids
    if not isinstance(ids, list):
        _refuse(field, ids, "must be text or token ids")
    for i, token in enumerate(ids):
        if type(token) is not int:
            _refuse(f"{field}[{i}]", token, "must be a token id")
    return ids


def _refuse(field: str, value: Any, reason: str) -> NoReturn:
    raise invalid(field, value, reason)
