"""Bodies of requests: OpenAI's fields, and vLLM's names for what it has beyond them.

Three kinds of fields are told apart. Those that are served. Those of OpenAI's API that are not: they are accepted
where they ask for nothing (null, or OpenAI's default) or are labels without effect, and otherwise refused by name,
since an answer that ignores what was asked for is a wrong answer. All others are refused by name too: they are
mistakes more often than not.

Sampling parameters are passed on as they came: one validator serves all doors (`jaxinfer.serve.admission`), and here
they are only described. What is declared with a type is strict: no string is taken for a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import ConfigDict, Field, WithJsonSchema

from jaxinfer.serve.chat.terms import Effort
from jaxinfer.serve.errors import Kind, ServeError, short
from jaxinfer.serve.http.errors import from_pydantic
from jaxinfer.serve.http.response_format import constraint_of

_TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}

# Described for the OpenAPI page, checked elsewhere.
Integer = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "null"}]})]
Number = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]})]
Boolean = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "null"}]})]
Strings = Annotated[Any, WithJsonSchema({"anyOf": [_STRINGS, {"type": "null"}]})]
StringOrStrings = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, {"type": "null"}]})]
TokenIds = Annotated[Any, WithJsonSchema({"anyOf": [_TOKEN_IDS, {"type": "null"}]})]
Biases = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]})
]
_SPECULATION: dict[str, Any] = {
    "type": "object",
    "properties": {
        "enabled": {"type": "boolean"},
        "max_tokens": {"type": "integer", "minimum": 0},
        "acceptance": {"enum": ["exact", "typical"]},
    },
    "additionalProperties": False,
}
Speculates = Annotated[Any, WithJsonSchema({"anyOf": [_SPECULATION, {"type": "null"}]})]
_STRUCTURED: dict[str, Any] = {
    "type": "object",
    "description": "Exactly one of these; enable_in_reasoning holds the thought, too.",
    "properties": {
        "json": {"anyOf": [{"type": "object"}, {"type": "string"}]},
        "json_object": {"type": "boolean"},
        "regex": {"type": "string"},
        "choice": _STRINGS,
        "grammar": {"type": "string"},
        "enable_in_reasoning": {"type": "boolean"},
    },
    "additionalProperties": False,
}
Structured = Annotated[Any, WithJsonSchema({"anyOf": [_STRUCTURED, {"type": "null"}]})]
_FORMAT: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {"type": "object"}},
    "required": ["type"],
}
Format = Annotated[Any, WithJsonSchema({"anyOf": [_FORMAT, {"type": "null"}]})]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]  # the first that is none is told: there may be many
Prompt = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS}]}),
]

# By the names that `SamplingParams` has too.
SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "skip_special_tokens",
    "speculation",
    "structured_outputs",
    "thinking_token_budget",
)
_NOTHING = (None,)


class Body(pydantic.BaseModel):
    """A body with these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """OpenAI's fields that are not served, and the values of them that ask for nothing."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """OpenAI's fields that are labels: they change no answer."""


class StreamOptions(Body):
    """Options of a stream: ``include_usage`` adds a last chunk with the usage."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, Field(description="Has no effect.")] = None


class Sampling(Body):
    """Fields that both kinds of completion share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: Annotated[str | None, Field(description="Default: the header X-Request-Id, or the server's own.")] = (
        None
    )
    n: Integer = None
    temperature: Number = None
    top_p: Number = None
    top_k: Integer = None
    min_p: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    logit_bias: Biases = None
    allowed_token_ids: TokenIds = None
    bad_words: Strings = None
    seed: Integer = None
    max_tokens: Integer = None
    min_tokens: Integer = None
    stop: StringOrStrings = None
    stop_token_ids: TokenIds = None
    ignore_eos: Boolean = None
    include_stop_str_in_output: Boolean = None
    skip_special_tokens: Boolean = None
    speculation: Speculates = None
    structured_outputs: Structured = None
    response_format: Format = None
    thinking_token_budget: Integer = None
    prompt_logprobs: Integer = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def sampling(self, most_biases: int) -> dict[str, Any]:
        """The fields that were set. JSON has only strings for the keys of ``logit_bias``: at most so many become token
        ids, since more are refused anyway."""
        values = ((name, getattr(self, name)) for name in SAMPLING)
        fields = {name: value for name, value in values if value is not None}
        if isinstance(fields.get("logit_bias"), dict) and len(fields["logit_bias"]) <= most_biases:
            fields["logit_bias"] = {_token_id(key): bias for key, bias in fields["logit_bias"].items()}
        return {**fields, **constraint_of(self.response_format, self.structured_outputs)}


class CompletionRequest(Sampling):
    """``POST /v1/completions``. ``max_tokens`` is 16 where it is not given; null is all that the context leaves."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": (None, "")}
    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    prompt: Prompt
    max_tokens: Integer = 16
    logprobs: Integer = None
    echo: bool | None = None
    best_of: Annotated[Any, WithJsonSchema({"type": "integer", "description": "n, if given."})] = None
    add_special_tokens: bool | None = None


class ChatCompletionRequest(Sampling):
    """``POST /v1/chat/completions``. What the model may call is told to its template."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": _NOTHING,
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "prediction": _NOTHING,
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "verbosity": _NOTHING,
        "web_search_options": _NOTHING,
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})

    messages: Annotated[Objects, Field(min_length=1)]
    tools: Objects | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"enum": ["none", "auto", None]})] = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: no call behind the first is shown.")] = None
    include_reasoning: Annotated[bool | None, Field(description="Default: true.")] = None
    reasoning_effort: Effort | None = None
    max_completion_tokens: Integer = None
    logprobs: bool | None = None
    top_logprobs: Integer = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Body):
    """``POST /tokenize``: a ``prompt``, or the ``messages`` of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: Annotated[bool | None, Field(description="Default: true for a prompt, false for messages.")] = (
        None
    )
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema(_TOKEN_IDS)]
    skip_special_tokens: bool = False


def checked[B: Body](kind: type[B], fields: Mapping[str, Any]) -> B:
    """A body of this kind.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    for name in kind.unserved:
        value = fields.get(name)
        if not any(value == other and type(value) is type(other) for other in kind.unserved[name]):
            raise ServeError(Kind.INVALID, f"{name}={short(value)} is not served", field=name)
    known = {name: value for name, value in fields.items() if name not in kind.unserved and name not in kind.ignored}
    for name in known:
        if name not in kind.model_fields:  # before pydantic makes an error of each of them
            raise ServeError(Kind.INVALID, f"{name[:100]} is not a field of this request", field=name[:100])
    try:
        return kind.model_validate(known)
    except pydantic.ValidationError as error:
        raise from_pydantic(error) from error


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 20):
        raise ServeError(Kind.INVALID, f"logit_bias key={short(key)} must be a token id", field="logit_bias")
    return int(key)
