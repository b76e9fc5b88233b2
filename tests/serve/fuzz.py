"""Structured but invalid requests, each determined by its number.

`requests(seed, count)` mixes three kinds: valid requests whose values are replaced, removed, added and nested; messages
generated from their descriptors without regard to meaning; and bytes damaged afterwards. `mutated` combines two
requests.
"""

from __future__ import annotations

import dataclasses
import json
import random
import struct
from collections.abc import Iterator
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from tests.serve.doors import METHODS, request_class

# ---- requests


@dataclasses.dataclass(frozen=True)
class RpcRequest:
    """Messages of one RPC.

    Attributes:
        whole: the bytes parse as messages, so that only their values can be rejected.
    """

    path: str
    messages: tuple[bytes, ...]
    whole: bool


@dataclasses.dataclass(frozen=True)
class HttpRequest:
    """An HTTP request with a body, or, if ``raw`` is given, bytes for a new connection."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    raw: bytes | None = None


Request = RpcRequest | HttpRequest


def requests(seed: int, count: int) -> Iterator[Request]:
    for number in range(count):
        yield made(random.Random(f"{seed}/{number}"))


def made(chance: random.Random) -> Request:
    """Return a new request."""
    return _rpc(chance) if chance.random() < 0.5 else _http(chance)


def mutated(chance: random.Random, request: Request, other: Request) -> Request:
    """Return ``request`` with a small change, and with a part of ``other`` if it has the same kind."""
    if isinstance(request, RpcRequest):
        given = other.messages if isinstance(other, RpcRequest) and other.path == request.path else ()
        return _mutated_rpc(chance, request, given)
    return _mutated_http(chance, request, other.body if isinstance(other, HttpRequest) else b"")


def _mutated_rpc(chance: random.Random, request: RpcRequest, other: tuple[bytes, ...]) -> RpcRequest:
    if not request.whole or chance.random() < 0.1:
        damaged = tuple(_damaged(chance, message) for message in request.messages)
        return dataclasses.replace(request, messages=damaged, whole=False)
    kind, found = request_class(request.path), list[bytes]()
    for raw in request.messages:
        try:
            message = kind.FromString(raw)
            if other and chance.random() < 0.3:
                message.MergeFromString(chance.choice(other))
        except DecodeError:
            return dataclasses.replace(request, whole=False)
        for _ in range(chance.choice((1, 1, 2, 4))):
            _disturb(chance, message)
        found.append(message.SerializeToString(deterministic=True))
    return dataclasses.replace(request, messages=tuple(found))


def _mutated_http(chance: random.Random, request: HttpRequest, other: bytes) -> HttpRequest:
    if request.raw is not None:
        return dataclasses.replace(request, raw=_damaged(chance, request.raw))
    if chance.random() < 0.05:
        request = dataclasses.replace(request, headers={**request.headers, **_header(chance)})
    try:
        value, given = json.loads(request.body), json.loads(other or b"null")
    except (ValueError, RecursionError):
        return dataclasses.replace(request, body=_damaged(chance, request.body))
    if isinstance(value, dict) and isinstance(given, dict) and given and chance.random() < 0.4:
        name = chance.choice(list(given))
        value[name] = given[name]
    for _ in range(chance.choice((1, 1, 2, 4))):
        value = _mutated(chance, value)
    return dataclasses.replace(request, body=json.dumps(value).encode(errors="surrogatepass"))


# ---- values

_INTEGERS = (0, 1, -1, 2, 7, 16, 258, 259, 260, 65535, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53, 2**53 + 1)
_HUGE = (2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**64), 10**30, -(10**300), 10**400)
_FLOATS = (0.0, -0.0, 0.5, 1.0, 1.0000001, -1.0, 2.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), -float("inf"))
_TEXTS = (
    "", " ", "Hi", "\0", "\n\r\n", "é", "狐" * 9, "🦊👩‍🚀", "\u202e\u200b", "\ufeff", "\uffff", "\U0010ffff",
    "a" * 129, "x" * 1025, "</s>", "<s>", "{{ 1 }}", "{% for", "null", "true", "NaN", "-1", "1e999", "../etc/passwd",
    "%n%s", "fake", "pirate", "../pirate", "/etc", "x" * 5000, "user", "system", "assistant", "́" * 300, "a\x7f\x80b",
)  # fmt: skip
_CHARACTERS = (*range(32, 127), *range(1, 0xD7FF, 500))
_SURROGATES = ("\ud800", "a\udfff", "\udc00\ud800")
_KEYS = (
    "prompt", "messages", "model", "stream", "stop", "logit_bias", "tools", "content", "role", "n", "", "💥",
    "__class__", "chat_template", "chat_template_kwargs", "tool_calls", "type", "text", "1", "-1", "x" * 300,
)  # fmt: skip


def _integer(chance: random.Random) -> int:
    if chance.random() < 0.2:
        return chance.getrandbits(chance.choice((8, 31, 33, 64, 70))) * chance.choice((1, -1))
    return chance.choice(_INTEGERS if chance.random() < 0.8 else _HUGE)


def _text(chance: random.Random) -> str:
    if chance.random() < 0.3:
        return "".join(map(chr, chance.sample(_CHARACTERS, 12)))
    return chance.choice(_TEXTS)


def _junk(chance: random.Random, depth: int = 0) -> Any:
    """Return a value of JSON or of a small superset of it."""
    kind = chance.randrange(10 if depth < 4 else 7)
    match kind:
        case 0 | 1:
            return _integer(chance)
        case 2:
            return chance.choice(_FLOATS)
        case 3 | 4:
            return chance.choice(_SURROGATES) if chance.random() < 0.05 else _text(chance)
        case 5:
            return chance.choice((True, False, None))
        case 6:
            return chance.choice(([], {}, [[]], [None], [{}], [""], {"": ""}))
        case 7 | 8:
            return [_junk(chance, depth + 1) for _ in range(chance.choice((1, 2, 3, 3 if depth else 70)))]
        case _:
            return {chance.choice(_KEYS): _junk(chance, depth + 1) for _ in range(3)}


# ---- HTTP

_COMPLETION = {
    "model": "fake", "prompt": ["Hi", [5, 6]], "max_tokens": 5, "n": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5,
    "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"5": 1.5},
    "allowed_token_ids": [5, 6], "bad_words": ["x"], "seed": 1, "min_tokens": 1, "stop": ["a", "b"],
    "stop_token_ids": [7], "ignore_eos": True, "include_stop_str_in_output": True,
    "skip_special_tokens": False, "logprobs": 1, "echo": True, "speculation": {"max_tokens": 2}, "top_n_sigma": 2,
    "prompt_logprobs": 1, "best_of": 2, "return_token_ids": True, "priority": 1, "cache_salt": "s", "user": "u",
    "stream": True, "stream_options": {"include_usage": True}, "add_special_tokens": True,
}  # fmt: skip
_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_CHAT = {
    **{name: value for name, value in _COMPLETION.items() if name not in ("prompt", "logprobs", "echo", "best_of")},
    "messages": _MESSAGES, "tools": [_TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2,
    "add_generation_prompt": True, "chat_template_kwargs": {"x": 1}, "response_format": {"type": "text"},
}  # fmt: skip
del _CHAT["add_special_tokens"]
_RESPONSE = {
    "model": "fake", "instructions": "Be brief.", "max_output_tokens": 5, "temperature": 1.0, "top_p": 0.9, "top_k": 5,
    "min_p": 0.1, "repetition_penalty": 1.1, "seed": 1, "ignore_eos": True, "priority": 1, "cache_salt": "s",
    "include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": True, "metadata": {"a": "b"},
    "text": {"format": {"type": "text"}}, "tool_choice": {"type": "function", "name": "f"}, "store": False,
    "top_n_sigma": 2, "reasoning": {"summary": "auto"},
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ],
}  # fmt: skip
_COUNTED = {
    "model": "fake", "system": [{"type": "text", "text": "Be brief."}], "thinking": {"type": "disabled"},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "output_config": {"effort": None},
    "tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So."},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2", "is_error": True}]},
    ],
}  # fmt: skip
_MESSAGE = {
    **_COUNTED, "max_tokens": 5, "stop_sequences": ["a"], "temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 1,
    "stream": True, "metadata": {"user_id": "u"}, "priority": 1, "cache_salt": "s", "ignore_eos": True,
}  # fmt: skip
_BODIES = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/v1/responses": _RESPONSE,
    "/v1/messages": _MESSAGE,
    "/v1/messages/count_tokens": _COUNTED,
    "/tokenize": {"prompt": "Hi", "add_special_tokens": True, "return_token_strs": True, "model": "fake"},
    "/detokenize": {"tokens": [5, 6, 7], "skip_special_tokens": True, "model": "fake"},
    "/v1/load_lora_adapter": {"lora_name": "pirate", "lora_path": "pirate", "load_inplace": True},
    "/v1/unload_lora_adapter": {"lora_name": "pirate", "lora_int_id": None},
    "/update_weights": {"path": "step-1", "version": 2, "mode": "keep"},
    "/weight_checker": {"action": "compare", "baseline": {"embed": "0"}},
}
# Fields whose values may stay in a request that is damaged at a deeper level.
_NEEDED = ("prompt", "messages", "tokens", "input", "max_tokens", "lora_name", "lora_path")
_PATHS = (
    "/reset_prefix_cache",
    "/health",
    "/ready",
    "/metrics",
    "/version",
    "/v1/models",
    "/v1/models/fake",
    "/v1/models/%00",
    "/docs",
    "/x",
)
_METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "FOO")
_HEADERS = ("X-Request-Id", "X-Request-Timeout", "Content-Type", "Accept-Encoding", "traceparent", "Expect", "Cookie")


def _http(chance: random.Random) -> HttpRequest:
    headers = {"Content-Type": "application/json"}
    if chance.random() < 0.1:
        headers |= _header(chance)
    if chance.random() < 0.05:
        return HttpRequest(chance.choice(_METHODS), chance.choice((*_PATHS, *_BODIES)), headers, b"")
    path = chance.choice((*_BODIES, "/v1/completions", "/v1/chat/completions"))
    body = _body(chance, _BODIES[path])
    if chance.random() < 0.15:
        body = _damaged(chance, body)
    request = HttpRequest("POST", path, headers, body)
    return dataclasses.replace(request, raw=_raw(chance, request)) if chance.random() < 0.03 else request


def _header(chance: random.Random) -> dict[str, str]:
    value = chance.choice(("", "0", "-1", "1e999", "nan", "0.001", "5", "é", "x" * 300, "00-" + "a" * 32 + "-b-01"))
    return {chance.choice(_HEADERS): value}


def _body(chance: random.Random, whole: dict[str, Any]) -> bytes:
    names = [name for name in whole if name in _NEEDED or chance.random() < 0.3]
    value: Any = {name: whole[name] for name in names}
    lists = [name for name in names if isinstance(whole[name], list)]
    if lists and chance.random() < 0.05:
        name = chance.choice(lists)
        value[name] = whole[name] * chance.choice((40, 600))
    value = json.loads(json.dumps(value))
    for _ in range(chance.choice((0, 1, 1, 1, 2, 4))):
        value = _mutated(chance, value)
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5)
    if chance.random() < 0.02:
        text = text[:-1] + f', "{chance.choice(names or ["n"])}": 1}}'
    if chance.random() < 0.02:
        text = text.replace(chance.choice((":", "[", '"')), "[" * chance.choice((70, 2000, 50_000)), 1)
    return text.encode(errors="surrogatepass")


def _mutated(chance: random.Random, value: Any) -> Any:
    """Return ``value`` with one element changed, at any depth."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        name = chance.choice(list(value))
        match chance.randrange(12):
            case 0:
                return {other: kept for other, kept in value.items() if other != name}
            case 1:
                return {**value, chance.choice(_KEYS): _junk(chance)}
            case 2:
                return {(chance.choice(_KEYS) if other == name else other): kept for other, kept in value.items()}
            case _:
                return {**value, name: _mutated(chance, value[name])}
    if isinstance(value, list) and value and chance.random() < 0.6:
        rank = chance.randrange(len(value))
        if chance.random() < 0.1:
            return value * chance.choice((2, 9))
        return [*value[:rank], _mutated(chance, value[rank]), *value[rank + 1 :]]
    return _junk(chance)


def _damaged(chance: random.Random, data: bytes) -> bytes:
    """Return the bytes with some flipped, lost, doubled or invented."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(4):
            case 0 if at < len(found):
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                del found[at : at + chance.choice((1, 2, 50))]
            case 2:
                found[at:at] = found[at : at + chance.choice((1, 9))]
            case _:
                found[at:at] = chance.randbytes(chance.choice((1, 3, 40)))
    return bytes(found)


def _raw(chance: random.Random, request: HttpRequest) -> bytes:
    head = f"{request.method} {request.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    whole = f"{head}Content-Length: {len(request.body)}\r\n\r\n".encode() + request.body
    return chance.randbytes(200) if chance.random() < 0.1 else _damaged(chance, whole)


# ---- gRPC

_INFERENCE, _OPEN = "jaxinfer.v1.Inference/", "inference.GRPCInferenceService/"
_SAMPLING = {
    "n": 2, "temperature": 1.0, "topP": 0.9, "topK": 5, "minP": 0.1, "presencePenalty": 1, "frequencyPenalty": -1,
    "repetitionPenalty": 1.1, "logitBias": {"5": 1.5}, "allowedTokenIds": {"ids": [5, 6]}, "badWords": ["x"],
    "seed": "1", "maxTokens": "5", "minTokens": "1", "stop": ["a"], "stopTokenIds": [7], "ignoreEos": True,
    "topNSigma": 2, "logprobs": 1, "promptLogprobs": 1, "skipSpecialTokens": False, "includeStopStrInOutput": True,
}  # fmt: skip
_CONVERSATION = {
    "messages": [
        {"role": "user", "content": "Hi", "fields": {"name": "x", "size": 3}},
        {"role": "assistant", "reasoning": "x", "toolCalls": [{"id": "a", "name": "f", "arguments": "{}"}]},
        {"role": "tool", "content": "x", "toolCallId": "a"},
    ],
    "parse": True,
    "toolChoice": {"mode": "TOOL_MODE_AUTO"},
    "tools": [_TOOL],
    "templateVariables": {"x": [1, {"y": None}]},
}
_TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": ["1"], "contents": {"bytesContents": ["SGk="]}}
_JSON_TENSOR = {
    "name": "sampling_parameters",
    "datatype": "BYTES",
    "shape": ["1"],
    "contents": {"bytesContents": ["eyJtYXhfdG9rZW5zIjogNSwgInN0b3AiOiBbImEiXX0="]},
}
_INFER = {
    "modelName": "fake",
    "id": "x",
    "inputs": [_TENSOR, _JSON_TENSOR],
    "outputs": [{"name": "text_output"}],
    "parameters": {"temperature": {"doubleParam": 0.5}, "n": {"int64Param": "2"}},
}
_VALID: dict[str, dict[str, Any]] = {
    f"{_INFERENCE}Generate": {"prompt": "Hi", "sampling": _SAMPLING, "model": "fake", "priority": 1, "cacheSalt": "s"},
    f"{_INFERENCE}GenerateBatch": {"chat": _CONVERSATION, "sampling": _SAMPLING},
    f"{_INFERENCE}Tokenize": {"chat": _CONVERSATION, "addSpecialTokens": True},
    f"{_INFERENCE}Detokenize": {"tokenIds": [5, 6, 7], "skipSpecialTokens": True},
    f"{_INFERENCE}Score": {"tokenIds": {"ids": [5, 6]}, "continuations": [{"text": "x"}, {"tokenIds": {"ids": [7]}}]},
    f"{_INFERENCE}GetModelInfo": {"model": "fake"},
    f"{_OPEN}ModelInfer": _INFER,
    f"{_OPEN}ModelStreamInfer": _INFER,
    f"{_OPEN}ModelMetadata": {"name": "fake", "version": "1"},
    f"{_OPEN}ModelReady": {"name": "fake"},
    "jaxinfer.v1.Control/LoadLora": {"loraName": "a", "loraPath": "pirate", "loadInplace": True},
    "jaxinfer.v1.Control/UnloadLora": {"loraName": "a"},
    "jaxinfer.v1.Control/Abort": {"requestId": "x", "outputIndex": 1, "tenant": "t"},
    "jaxinfer.v1.Control/UpdateWeights": {"path": "step-1", "weightVersion": 2, "mode": "PAUSE_MODE_KEEP"},
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": {"listServices": ""},
}
# RPCs that end the server or the requests of others, stop the engine, or never end.
_LEFT_OUT = {
    *(f"jaxinfer.v1.Control/{name}" for name in ("Drain", "AbortAll", "Pause", "Sleep", "WatchStartup")),
    "grpc.health.v1.Health/Watch",
}
_ANY = tuple(sorted(set(METHODS) - _LEFT_OUT))
_OFTEN = (f"{_INFERENCE}Generate", f"{_INFERENCE}GenerateBatch", f"{_OPEN}ModelInfer")
_WILD = 0.1


def _rpc(chance: random.Random) -> RpcRequest:
    path = chance.choice(_ANY if chance.random() < 0.3 else (*_VALID, *_OFTEN))
    count = chance.choice((1, 1, 2, 5)) if METHODS[path].client_streaming else 1
    messages = tuple(_message(chance, path) for _ in range(count))
    if chance.random() < 0.15:
        return RpcRequest(path, tuple(_damaged(chance, message) for message in messages), whole=False)
    return RpcRequest(path, messages, whole=True)


def _message(chance: random.Random, path: str) -> bytes:
    message = request_class(path)()
    if path in _VALID and chance.random() < 0.85:
        json_format.ParseDict(_VALID[path], message)
        for _ in range(chance.choice((0, 1, 1, 2, 4))):
            _disturb(chance, message)
    else:
        _fill(chance, message)
    unknown = b"\xfa\x7f\x03abc" if chance.random() < 0.05 else b""
    return message.SerializeToString(deterministic=True) + unknown


def _disturb(chance: random.Random, message: Message) -> None:
    """Clear, replace or fill one field, at any depth."""
    present = [value for field, value in message.ListFields() if _is_message(field)]
    if present and chance.random() < 0.7:
        _disturb(chance, chance.choice(present))
        return
    several = [value for field, value in message.ListFields() if field.is_repeated and field.message_type]
    lists = [value for value in several if not hasattr(value, "keys") and len(value)]
    if lists and chance.random() < 0.5:
        _disturb(chance, chance.choice(chance.choice(lists)))
        return
    fields = message.DESCRIPTOR.fields
    if fields:
        field = chance.choice(fields)
        message.ClearField(field.name)
        if chance.random() < 0.8:
            _set(chance, message, field, 0)


def _fill(chance: random.Random, message: Message, depth: int = 0) -> None:
    for field in message.DESCRIPTOR.fields:
        if chance.random() < (0.3 if depth < 5 else _WILD):
            _set(chance, message, field, depth)


def _set(chance: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    if depth > 12:
        return
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_entries(chance, getattr(message, field.name), field.message_type, depth)
    elif field.is_repeated:
        for _ in range(chance.choice((1, 1, 2, 70))):
            if field.message_type is not None:
                _fill(chance, getattr(message, field.name).add(), depth + 3)
            else:
                getattr(message, field.name).append(_scalar(chance, field))
    elif field.message_type is not None:
        child = getattr(message, field.name)
        child.SetInParent()
        _fill(chance, child, depth + 1)
    else:
        setattr(message, field.name, _scalar(chance, field))


def _set_entries(chance: random.Random, entries: Any, kind: Descriptor, depth: int) -> None:
    key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
    for _ in range(chance.choice((1, 3, 40))):
        if value.message_type is not None:
            _fill(chance, entries[_scalar(chance, key)], depth + 3)
        else:
            entries[_scalar(chance, key)] = _scalar(chance, value)


def _scalar(chance: random.Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = _text(chance)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return chance.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_FLOAT:
            return struct.unpack("<f", chance.randbytes(4))[0]
        case FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice(field.enum_type.values).number
        case _:
            return _fitted(_integer(chance), field)


def _fitted(number: int, field: FieldDescriptor) -> int:
    """Return the number wrapped to the range of the field."""
    bits = 32 if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    number %= 2**bits
    signed = field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    return number - 2**bits if signed and number >= 2 ** (bits - 1) else number


def _is_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not field.is_repeated


def message_class(path: str) -> type[Message]:
    """Return the response class of an RPC."""
    return GetMessageClass(METHODS[path].output_type)
