"""Request validation, shared by the gRPC and HTTP APIs. No jax.

The order of the checks is fixed and does not depend on the order of the fields: request id, timeout, list sizes, each
sampling parameter, limits, the prompt, and last the checks that need token ids.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

from jaxinfer.sampling_params import MAX_LOGPROB_TOKEN_IDS, ContextLengthError, RequestError, SamplingParams
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call, Conversation, Input, ModelCard, ServeLimits
from jaxinfer.text.chat_template import ARGUMENTS as TEMPLATE_ARGUMENTS

MAX_ID_CHARACTERS = 128
MAX_SALT_CHARACTERS = 256

_PRIORITIES = range(-(2**31), 2**31)
_NAMES = tuple(field.name for field in dataclasses.fields(SamplingParams))


def request_id_of(call: Call) -> str:
    """Return the request id of a call, or generate one if the client set none.

    Raises:
        RequestError: the id is not 1 to 128 printable characters.
    """
    if call.request_id is None:
        return uuid.uuid4().hex
    require_printable("request_id", call.request_id, 1, MAX_ID_CHARACTERS)
    return call.request_id


def check_terms(call: Call) -> None:
    """Check timeout, priority and cache salt: the fields that are neither prompt nor sampling parameters.

    Raises:
        RequestError: a field has an invalid value.
        ServeError: DEADLINE: the timeout has passed.
    """
    timeout: object = call.timeout
    if timeout is not None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not math.isfinite(timeout):
            raise RequestError("timeout", f"={timeout!r} must be a finite number of seconds")
        if timeout <= 0:
            raise ServeError(Kind.DEADLINE, "the deadline had passed when the request came")
    if isinstance(call.priority, bool) or not isinstance(call.priority, int) or call.priority not in _PRIORITIES:
        raise RequestError("priority", f"={call.priority!r} must be an integer of 32 bits")
    require_printable("cache_salt", call.cache_salt, 0, MAX_SALT_CHARACTERS)


def sampling_of(call: Call, card: ModelCard, limits: ServeLimits) -> SamplingParams:
    """Merge a call's sampling parameters (None: not set) over the checkpoint's and the `SamplingParams` defaults.

    Raises:
        RequestError: the first invalid field; the message names field and value.
    """
    unknown = sorted(call.sampling.keys() - set(_NAMES))
    if unknown:
        raise RequestError(unknown[0], f"is no sampling parameter: they are {', '.join(_NAMES)}")
    sampling = {name: value for name in _NAMES if (value := call.sampling.get(name)) is not None}
    _check_sizes(sampling, card, limits)
    params = SamplingParams(**{"max_tokens": None, **card.defaults, **sampling})
    for field, most in (("n", limits.n), ("logprobs", limits.logprobs), ("prompt_logprobs", limits.logprobs)):
        value = getattr(params, field)
        if value is not None and value > most:
            raise RequestError(field, f"={value} must be at most {most}")
    return params


def check_prompt(prompt: Input, limits: ServeLimits, *, allow_templates: bool) -> None:
    """Check the type and size of a prompt before it is tokenized.

    Raises:
        RequestError: the prompt has an invalid type or is too large (`ContextLengthError`: too many characters).
    """
    match prompt:
        case str():
            _check_prompt_characters("prompt", len(prompt), limits)
        case Conversation():
            if prompt.template is not None and not allow_templates:
                raise RequestError("template", ": this server uses no chat templates of requests")
            if taken := TEMPLATE_ARGUMENTS & prompt.variables.keys():
                raise RequestError("variables", f": {min(taken)} is set by its own field")
            if len(prompt.messages) > limits.messages:
                raise RequestError("messages", f"must be at most {limits.messages}, not {len(prompt.messages)}")
            parts = (prompt.messages, prompt.tools, dict(prompt.variables), prompt.template)
            _check_prompt_characters("messages", sum(map(len, _strings_in(parts))), limits)
        case bytes() | bytearray():
            raise RequestError("prompt", "must be text, token ids or messages, not bytes")
        case Sequence():
            pass  # vocabulary and context length are checked later
        case _:
            raise RequestError("prompt", f"must be text, token ids or messages, not {type(prompt).__name__}")


def _check_sizes(sampling: Mapping[str, Any], card: ModelCard, limits: ServeLimits) -> None:
    """Check list sizes before any item is examined. A single ``stop`` string counts as a list of one."""
    sizes = {
        "stop": limits.stop_strings,
        "stop_token_ids": limits.stop_token_ids,
        "bad_words": limits.bad_words,
        "logit_bias": limits.logit_bias,
        "allowed_token_ids": card.vocab_size,
        "forced_token_ids": card.max_model_len,
        "logprob_token_ids": MAX_LOGPROB_TOKEN_IDS,
    }
    for field, most in sizes.items():
        value = sampling.get(field)
        if isinstance(value, Sized) and not isinstance(value, str) and len(value) > most:
            raise RequestError(field, f"must hold at most {most} entries, not {len(value)}")
    for field in ("stop", "bad_words"):
        value = sampling.get(field)
        for text in (value,) if isinstance(value, str) else value if isinstance(value, Sequence) else ():
            if isinstance(text, str) and len(text) > limits.stop_characters:
                raise RequestError(field, f"must have at most {limits.stop_characters} characters, not {len(text)}")


def check_characters(field: str, characters: int, limits: ServeLimits) -> None:
    """Raise `RequestError` if a text has more than ``limits.prompt_characters`` characters."""
    if characters > limits.prompt_characters:
        raise RequestError(field, _too_many(characters, limits))


def _check_prompt_characters(field: str, characters: int, limits: ServeLimits) -> None:
    if characters > (most := limits.prompt_characters):
        raise ContextLengthError(field, _too_many(characters, limits), f"{characters} characters", most)


def _too_many(characters: int, limits: ServeLimits) -> str:
    return f"must have at most {limits.prompt_characters} characters, not {characters}"


def _strings_in(value: object) -> Iterator[str]:
    """Yield every string, including mapping keys. Iterative, since requests may be nested arbitrarily deep."""
    todo = [value]
    while todo:
        match todo.pop():
            case str() as text:
                yield text
            case Mapping() as mapping:
                todo.extend(mapping.keys())
                todo.extend(mapping.values())
            case list() | tuple() as items:
                todo.extend(items)


def require_printable(field: str, value: object, least: int, most: int) -> None:
    """Raise `RequestError` unless ``value`` is a string of ``least`` to ``most`` printable characters."""
    if not isinstance(value, str) or not least <= len(value) <= most or not value.isprintable():
        size = f"{least} to {most}" if least else f"at most {most}"
        raise RequestError(field, f"={str(value)[:most]!r} must have {size} printable characters")
