"""Request bodies: OpenAI's fields, and vLLM's names for extensions.

Tables define which fields are served and how the remaining fields are treated (`jaxinfer.serve.http.fields`). Sampling
parameters are passed on unchecked, because one validator serves all APIs (`jaxinfer.serve.api.admission`); here they
are only described. Fields declared with a type are strict: a string is not accepted as a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, NoReturn

from pydantic import AfterValidator, Field, WithJsonSchema, create_model

from jaxinfer.sampling_params import PARAMETERS
from jaxinfer.serve.api.errors import Kind, ServeError, short
from jaxinfer.serve.frontend.chat.terms import Effort
from jaxinfer.serve.http.fields import Body, left_out

_TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}

# Types described for the OpenAPI page and validated elsewhere.
Integer = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "null"}]})]
Number = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]})]
Boolean = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "null"}]})]
Text = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]})]
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
_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}
_OLD = Field(json_schema_extra={"deprecated": True}, description="Older vLLM name of a field of structured_outputs.")
_STRUCTURED: dict[str, Any] = {
    "type": "object",
    "description": "Exactly one constraint; enable_in_reasoning applies it to the reasoning, too.",
    "properties": {
        "json": {"anyOf": [{"type": "object"}, {"type": "string"}]},
        "json_object": {"type": "boolean"},
        "regex": {"type": "string"},
        "choice": _STRINGS,
        "grammar": {"type": "string"},
        "structural_tag": {"anyOf": [{"type": "object"}, {"type": "string"}]},
        "enable_in_reasoning": {"type": "boolean"},
    },
    "additionalProperties": False,
}
Structured = Annotated[Any, WithJsonSchema({"anyOf": [_STRUCTURED, {"type": "null"}]})]
_FORMAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
        "json_schema": {"type": "object"},
    },
    "required": ["type"],
}
Format = Annotated[Any, WithJsonSchema({"anyOf": [_FORMAT, {"type": "null"}]})]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]  # fail_fast: lists may be long
Prompt = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS}]}),
]

_CHOICES = ["none", "auto", "required", None]

_KINDS: Mapping[str, Any] = {
    "int": Integer,
    "float": Number,
    "bool": Boolean,
    "str": Text,
    "Sequence[str]": Strings,
    "str | Sequence[str]": StringOrStrings,
    "Sequence[int]": TokenIds,
    "Mapping[int, float]": Biases,
    "Speculation | Mapping[str, Any]": Speculates,
    "StructuredOutputs | Mapping[str, Any]": Structured,
}
SAMPLING = tuple(name for name in PARAMETERS if name != "logprobs")
"""Fields of `SamplingParams` with the same name and meaning in requests."""
NOTHING = (None,)
ACCOUNTING: Mapping[str, tuple[Any, ...]] = {
    "prompt_cache_key": NOTHING,
    "prompt_cache_retention": NOTHING,
    "safety_identifier": NOTHING,
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "user": NOTHING,
}
"""OpenAI's account-related fields (user, storage, billing), and the values that are accepted silently."""
_BACKENDS = dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), NOTHING)
HOSTED: Mapping[str, None] = dict.fromkeys(
    (
        *(
            "apply_patch",
            "bash",
            "code_execution",
            "code_interpreter",
            "computer",
            "computer_use",
            "computer_use_preview",
        ),
        *("custom", "file_search", "image_generation", "local_shell", "mcp", "mcp_toolset", "memory", "namespace"),
        *("shell", "text_editor", "tool_search", "tool_search_tool_bm25", "tool_search_tool_regex"),
        *("web_fetch", "web_search", "web_search_preview"),
    )
)
"""Types of tools that run on OpenAI's or Anthropic's side, or whose calls are not JSON. They are left out of the
prompt: the model does not see them, so it cannot call them."""
_CONTINUES = "Continue the last message, which must be from the assistant."


def _functions(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools whose type is not in `HOSTED`."""
    if tools is None:
        return None
    return [tool for rank, tool in enumerate(tools) if not left_out(f"tools[{rank}]", tool.get("type"), HOSTED)]


class StreamOptions(Body):
    """Stream options; ``include_usage`` adds a last chunk with the usage."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}

    include_usage: bool | None = None


def with_sampling(base: type[Body], names: Iterable[str]) -> Any:
    """Return a subclass of ``base`` with these sampling parameters as fields."""
    fields: dict[str, Any] = {name: (_KINDS[PARAMETERS[name].kind], None) for name in names}
    return create_model(base.__name__, __base__=base, **fields)


class Sampling(with_sampling(Body, SAMPLING)):  # type: ignore[misc]
    """Fields shared by completions and chat completions."""

    renamed: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("regex", "guided_pattern"), "structured_outputs.regex"),
        **dict.fromkeys(("ebnf", "grammar", "gbnf"), "structured_outputs.grammar"),
        **dict.fromkeys(("json_schema", "format", "text", "output_config"), "response_format"),
        **dict.fromkeys(("choices", "choice"), "structured_outputs.choice"),
        "guided_json_object": "structured_outputs.json_object",
        "structural_tag": "structured_outputs.structural_tag",
        "stop_sequences": "stop",
        "max_new_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
    }

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: Annotated[
        str | None, Field(description="Request id (default: the header X-Request-Id, or generated).")
    ] = None
    response_format: Format = None
    guided_json: Annotated[Any, WithJsonSchema(_SCHEMA), _OLD] = None
    guided_regex: Annotated[str | None, _OLD] = None
    guided_choice: Annotated[Strings, _OLD] = None
    guided_grammar: Annotated[str | None, _OLD] = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def sampling(self, most_biases: int) -> dict[str, Any]:
        """Return the sampling fields that were set. JSON keys of ``logit_bias`` are strings: up to ``most_biases`` of
        them are converted to token ids, since a larger map is rejected anyway."""
        values = ((name, getattr(self, name)) for name in SAMPLING)
        fields = {name: value for name, value in values if value is not None}
        if isinstance(fields.get("logit_bias"), dict) and len(fields["logit_bias"]) <= most_biases:
            fields["logit_bias"] = {_token_id(key): bias for key, bias in fields["logit_bias"].items()}
        return {**fields, **constraint_of(self.response_format, self.structured_outputs, self.guided)}

    @property
    def guided(self) -> dict[str, Any]:
        """Fields of `GUIDED` that were set."""
        return {name: getattr(self, name) for name in GUIDED if getattr(self, name) is not None}


class CompletionRequest(Sampling):
    """Create a text completion (``POST /v1/completions``). ``max_tokens``: default 16; null: the context limit."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": (None, "")}
    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_BACKENDS, "user": NOTHING}

    prompt: Prompt
    max_tokens: Integer = 16
    logprobs: Integer = None
    echo: bool | None = None
    best_of: Annotated[Any, WithJsonSchema({"type": "integer", "description": "Must equal n."})] = None
    add_special_tokens: bool | None = None


class ImageOptions(Body):
    """Options of the image processor for all images and videos of a request; ``fps`` is of videos."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None


class ChatCompletionRequest(Sampling):
    """Create a chat completion (``POST /v1/chat/completions``); tools are passed to the chat template."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": NOTHING,
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
    }
    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_BACKENDS,
        **ACCOUNTING,
        "metadata": NOTHING,
        "prediction": NOTHING,
        "verbosity": (None, "medium"),
        "web_search_options": NOTHING,
    }
    renamed: ClassVar[Mapping[str, str]] = {
        **Sampling.renamed,
        "input": "messages",
        "prompt": "messages",
        "reasoning": "reasoning_effort",
        "effort": "reasoning_effort",
        "enable_thinking": "chat_template_kwargs.enable_thinking",
        "thinking": "chat_template_kwargs.thinking",
        "thinking_budget": "thinking_token_budget",
    }

    messages: Annotated[Objects, Field(min_length=1)]
    tools: Annotated[Objects | None, AfterValidator(_functions)] = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"enum": _CHOICES}, {"type": "object"}]})] = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: return only the first tool call.")] = None
    include_reasoning: Annotated[bool | None, Field(description="Return the reasoning (default: true).")] = None
    reasoning_effort: Effort | None = None
    max_completion_tokens: Integer = None
    logprobs: bool | None = None
    top_logprobs: Integer = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool | None, Field(description=_CONTINUES)] = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ImageOptions | None = None


class TokenizeRequest(Body):
    """Tokenize a ``prompt`` or the ``messages`` of a chat (``POST /tokenize``)."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool | None, Field(description=_CONTINUES)] = None
    add_special_tokens: Annotated[bool | None, Field(description="Default: true with prompt, false with messages.")] = (
        None
    )
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ImageOptions | None = None


class DetokenizeRequest(Body):
    """Convert token ids to text (``POST /detokenize``)."""

    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema(_TOKEN_IDS)]
    skip_special_tokens: bool = False


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 20):
        raise ServeError(Kind.INVALID, f"logit_bias key={short(key)} must be a token id", field="logit_bias")
    return int(key)


_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_TAG_FIELDS = ("format", "structures", "triggers")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
_FIELDS = {"json_schema": ("json_schema",), "json_object": ("schema",), "structural_tag": _TAG_FIELDS}
GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""vLLM's older names for fields of ``structured_outputs``."""
_ELSEWHERE = {kind: f"structured_outputs.{kind}" for kind in GUIDED.values()} | {
    "ebnf": "structured_outputs.grammar",
    "json": "response_format of type json_schema",
}
"""Types of other APIs, and the field to use here instead."""


def constraint_of(
    response_format: Any, structured_outputs: Any, guided: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return ``{"structured_outputs": ...}`` for the sampling parameters, or {} if no constraint is requested.

    A schema is enforced exactly even if ``strict`` is not true; a schema that cannot be enforced is rejected.

    Args:
        guided: values by the names of `GUIDED`.

    Raises:
        ServeError: INVALID: ``response_format`` is malformed, or several fields constrain the output.
    """
    guided = guided or {}
    for place, name in enumerate(guided):
        others = [*list(guided)[:place], *(["structured_outputs"] if structured_outputs is not None else [])]
        if others:
            _refuse(name, guided[name], f"and {others[0]} exclude each other")
    constraint = {GUIDED[name]: value for name, value in guided.items()} or structured_outputs
    return _of_format(response_format, constraint) or ({"structured_outputs": constraint} if guided else {})


def _of_format(response_format: Any, structured_outputs: Any) -> dict[str, Any]:
    if response_format is None:
        return {}
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if not isinstance(kind, str) or kind not in _TYPES:
        hint = f": there is {_ELSEWHERE[kind]}" if isinstance(kind, str) and kind in _ELSEWHERE else ""
        _refuse("response_format.type", kind, f"must be one of {', '.join(_TYPES)}{hint}")
    fields = _FIELDS.get(kind, ())
    for name in response_format:
        if name != "type" and name not in fields:
            _refuse(f"response_format.{name[:50]}", response_format[name], f"is no field of type {kind}")
    if kind == "text":
        return {}
    if structured_outputs is not None:
        _refuse("response_format.type", kind, "and structured_outputs exclude each other")
    if kind == "structural_tag":
        return {"structured_outputs": {"structural_tag": response_format}}
    if kind == "json_object":
        schema = response_format.get("schema")  # a field of llama.cpp, Together and Fireworks
        if schema is not None and not isinstance(schema, dict):
            _refuse("response_format.schema", schema, "must be an object")
        return {"structured_outputs": {"json": schema} if schema else {"json_object": True}}
    return {"structured_outputs": _of_schema(response_format.get("json_schema"))}


def _of_schema(given: Any) -> dict[str, Any]:
    place = "response_format.json_schema"
    if not isinstance(given, dict):
        _refuse(place, given, "must be an object")
    for name in given:
        if name not in _SCHEMA_FIELDS:
            _refuse(f"{place}.{name[:50]}", given[name], f"is no field of it: they are {', '.join(_SCHEMA_FIELDS)}")
    if not isinstance(given.get("name"), str) or not given["name"]:
        _refuse(f"{place}.name", given.get("name"), "must be a text that is not empty")
    if given.get("strict") not in (None, True, False):
        _refuse(f"{place}.strict", given["strict"], "must be true or false")
    schema = given.get("schema")
    if schema is None:
        return {"json_object": True}
    if not isinstance(schema, dict):
        _refuse(f"{place}.schema", schema, "must be an object")
    return {"json": schema}


def _refuse(place: str, value: Any, reason: str) -> NoReturn:
    raise ServeError(Kind.INVALID, f"{place}={short(value)} {reason}", place.partition(".")[0])
