"""Request bodies within all limits that cost more than their size suggests: one per API and known attack."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable

from jaxinfer.protos.oip import open_inference_pb2 as oip
from jaxinfer.protos.v1 import inference_pb2 as pb

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
_ITEM, _SAID = '{"role":"user","content":', '{"max_tokens":1,"messages":['
_HI = f'{_SAID}{_ITEM}"a"}}]'
GENERATE, BATCH = "jaxinfer.v1.Inference/Generate", "jaxinfer.v1.Inference/GenerateBatch"
SCORE, TOKENIZE = "jaxinfer.v1.Inference/Score", "jaxinfer.v1.Inference/Tokenize"
DETOKENIZE, INFER = "jaxinfer.v1.Inference/Detokenize", "inference.GRPCInferenceService/ModelInfer"


@dataclasses.dataclass(frozen=True)
class Attack:
    """A body of about the given size for an HTTP route or an RPC.

    Attributes:
        is_work: the request is valid but expensive, and is processed over several turns of the event loop.
    """

    name: str
    door: str
    make: Callable[[int], bytes]
    is_work: bool = False


def _filled(head: str, item: str, tail: str) -> Callable[[int], bytes]:
    """Return a function that repeats ``item``, separated by commas, as often as the size allows."""

    def make(size: int) -> bytes:
        count = max(1, (size - len(head) - len(tail)) // (len(item.encode()) + 1))
        return (head + ",".join([item] * count) + tail).encode()

    return make


def _keys(head: str, tail: str) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        return (head + ",".join(f'"{k:08x}":1' for k in range(size // 13)) + tail).encode()

    return make


def _text(character: str, **more: object) -> Callable[[int], bytes]:
    """Return a function that makes a prompt of at most 4 Mi characters."""

    def make(size: int) -> bytes:
        count = min(size // len(json.dumps(character)[1:-1]), 4 << 20)
        return json.dumps({"prompt": character * count, **more}).encode()

    return make


def _long(field: str, item: bytes) -> Callable[[int], bytes]:
    return lambda size: f'{{"prompt":"a","{field}":'.encode() + item * (size // len(item)) + b"}"


def _prompts(prompt: str | list[int]) -> bytes:
    return json.dumps({"prompt": [prompt] * 1024, "max_tokens": 1}).encode()


_HELD = '{"prompt":"a","structured_outputs":{"json":'
_CALLED = '{"messages":[{"role":"u","tool_calls":[{"function":{"name":"f","arguments":"['
HTTP = (
    Attack("messages of numbers", CHAT, _filled('{"messages":[', "1", "]}")),
    Attack("messages of lists", CHAT, _filled('{"messages":[', "[]", "]}")),
    Attack("empty messages", CHAT, _filled('{"messages":[', "{}", "]}")),
    Attack("short messages", CHAT, _filled('{"messages":[', '{"role":"u"}', "]}")),
    Attack("parts of a message", CHAT, _filled('{"messages":[{"role":"u","content":[', "{}", "]}]}")),
    Attack(
        "texts of a message",
        CHAT,
        _filled('{"messages":[{"role":"u","content":[', '{"type":"text","text":""}', "]}]}"),
    ),
    Attack("tools", CHAT, _filled('{"messages":[{"role":"u"}],"tools":[', "{}", "]}")),
    Attack("tools of numbers", CHAT, _filled('{"messages":[{"role":"u"}],"tools":[', "1", "]}")),
    Attack("template variables", CHAT, _keys('{"messages":[{"role":"u"}],"chat_template_kwargs":{', "}}")),
    Attack("fields that there are not", CHAT, _keys('{"messages":[{"role":"u"}],', "}")),
    Attack("items of numbers", RESPONSES, _filled('{"input":[', "1", "]}")),
    Attack("items of a user", RESPONSES, _filled('{"input":[', '{"role":"user","content":""}', "]}")),
    Attack("parts of an item", RESPONSES, _filled(f'{{"input":[{_ITEM}[', '{"type":"input_text","text":""}', "]}]}")),
    Attack("flat tools", RESPONSES, _filled('{"input":"a","tools":[', '{"type":"function","name":"f"}', "]}")),
    Attack("metadata", RESPONSES, _keys('{"input":"a","metadata":{', "}}")),
    Attack("a long instruction", RESPONSES, lambda size: b'{"input":"a","instructions":"%s"}' % (b"a" * size)),
    Attack("messages of numbers", MESSAGES, _filled(_SAID, "1", "]}")),
    Attack("messages of a user", MESSAGES, _filled(_SAID, '{"role":"user","content":""}', "]}")),
    Attack("blocks of a message", MESSAGES, _filled(f"{_SAID}{_ITEM}[", '{"type":"text","text":""}', "]}]}")),
    Attack("blocks of a system", MESSAGES, _filled(f'{_HI},"system":[', '{"type":"text","text":""}', "]}")),
    Attack("fields of a completion", COMPLETIONS, _keys('{"prompt":"a",', "}")),
    Attack("prompt of numbers", COMPLETIONS, _filled('{"prompt":[', "1", "]}")),
    Attack("prompt of large numbers", COMPLETIONS, _filled('{"prompt":[', "258", "]}")),
    Attack("prompt of fractions", COMPLETIONS, _filled('{"prompt":[', "1.5", "]}")),
    Attack("prompts of one token", COMPLETIONS, _filled('{"prompt":[', "[1]", "]}")),
    Attack("empty prompts", COMPLETIONS, _filled('{"prompt":[', '""', "]}")),
    Attack("a thousand prompts", COMPLETIONS, lambda size: _prompts("a" * (size // 1024)), is_work=True),
    Attack("a thousand prompts of ids", COMPLETIONS, lambda size: _prompts([7] * min(size // 3072, 99)), is_work=True),
    Attack("a long text", COMPLETIONS, _text("a")),
    Attack("a long text of spaces", COMPLETIONS, _text(" ")),
    Attack("a long text of escapes", COMPLETIONS, _text("\n")),
    Attack("a long text of foxes", COMPLETIONS, _text("🦊")),
    Attack("a text that is closed by nothing", COMPLETIONS, lambda size: b'{"prompt":"' + b'\\"' * (size // 2)),
    Attack("brackets in a text", COMPLETIONS, lambda size: b'{"prompt":"' + b"[" * size + b'"}'),
    Attack("deep lists", COMPLETIONS, lambda size: b'{"prompt":' + (b"[" * 60 + b"]" * 60 + b",") * (size // 121)),
    Attack("a number of many digits", COMPLETIONS, _long("seed", b"9")),
    Attack("numbers of many digits", COMPLETIONS, _filled('{"prompt":[', "9" * 4000, "]}")),
    Attack("stop strings", COMPLETIONS, _filled('{"prompt":"a","stop":[', '"a"', "]}")),
    Attack("bad words", COMPLETIONS, _filled('{"prompt":"a","bad_words":[', '"a"', "]}")),
    Attack("biases", COMPLETIONS, _keys('{"prompt":"a","logit_bias":{', "}}")),
    Attack("temperature of keys", COMPLETIONS, _keys('{"prompt":"a","temperature":{', "}}")),
    Attack("allowed tokens", COMPLETIONS, _filled('{"prompt":"a","allowed_token_ids":[', "1", "]}")),
    Attack("stop tokens", COMPLETIONS, _filled('{"prompt":"a","stop_token_ids":[', "1", "]}")),
    Attack("values of a schema", COMPLETIONS, _filled(_HELD + '{"enum":[', "{}", "]}}}")),
    Attack("a schema in a text", COMPLETIONS, _filled(_HELD + '"{\\"enum\\":[', "{}", ']}"}}')),
    Attack("arguments of a call", CHAT, _filled(_CALLED, "{}", ']"}}]}]}')),
    Attack("unserved field", CHAT, _filled('{"messages":[{"role":"u"}],"functions":[', "1", "]}")),
    Attack("label without effect", CHAT, _filled('{"messages":[{"role":"u"}],"metadata":[', "[]", "]}")),
    Attack("text to tokenize", "/tokenize", _text("a")),
    Attack("text to tokenize and spell", "/tokenize", _text("a", return_token_strs=True)),
    Attack("messages to tokenize", "/tokenize", _filled('{"messages":[', "1", "]}")),
    Attack("tokens to detokenize", "/detokenize", _filled('{"tokens":[', "70", "]}")),
    Attack("tokens that are none", "/detokenize", _filled('{"tokens":[', '""', "]}")),
)  # fmt: skip


# ---- protobuf, encoded by hand: protobuf's own classes would need the memory that is attacked


def field(number: int, data: bytes) -> bytes:
    """Return a field of wire type 2 (length-delimited)."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def number_of(message: object, name: str) -> int:
    return message.DESCRIPTOR.fields_by_name[name].number  # type: ignore[attr-defined]


def _within(message: object, path: str, item: bytes) -> Callable[[int], bytes]:
    """Return a function that repeats ``item`` as often as the size allows, in the field named by ``path``."""

    def make(size: int) -> bytes:
        numbers, descriptor = [], message.DESCRIPTOR  # type: ignore[attr-defined]
        for name in path.split("."):
            found = descriptor.fields_by_name[name]
            numbers.append(found.number)
            descriptor = found.message_type
        once = field(numbers.pop(), item)
        data = once * (size // len(once))
        for number in reversed(numbers):
            data = field(number, data)
        return data

    return make


def _packed(message: object, path: str, *more: bytes) -> Callable[[int], bytes]:
    """Return a function that packs as many ones as the size allows."""
    return lambda size: _within(message, path, b"\1" * size)(size + 20) + b"".join(more)


def _value(size: int) -> bytes:
    """Return a message with a Struct: one list of nulls."""
    null = field(1, b"\x08\x00")  # ListValue.values
    struct_ = field(1, field(1, b"x") + field(2, field(6, null * (size // len(null)))))
    return field(number_of(pb.GenerateRequest, "chat"), field(1, field(number_of(pb.ChatMessage, "fields"), struct_)))


def _arguments(size: int) -> bytes:
    call = field(number_of(pb.ToolCall, "arguments"), b"[" + b"{}," * (size // 3) + b"{}]")
    message = field(number_of(pb.ChatMessage, "tool_calls"), call)
    return field(number_of(pb.GenerateRequest, "chat"), field(number_of(pb.Chat, "messages"), message))


def _infer(contents: Callable[[int], bytes]) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        return oip.ModelInferRequest(model_name="fake").SerializeToString() + contents(size)

    return make


def _sampling(size: int) -> bytes:
    given = _keys("{", "}")(size)
    inputs = [
        oip.ModelInferRequest.InferInputTensor(name=name, datatype="BYTES", shape=[1])
        for name in ("text_input", "sampling_parameters")
    ]
    raws = [struct.pack("<I", len(each)) + each for each in (b"a", given)]
    return oip.ModelInferRequest(model_name="fake", inputs=inputs, raw_input_contents=raws).SerializeToString()


def _ones(size: int) -> bytes:
    return field(number_of(pb.GenerateRequest, "token_ids"), b"\x08\x01" * (size // 2))


def _prompt(text: str) -> Callable[[int], bytes]:
    return lambda size: pb.GenerateRequest(prompt=text * min(size, 4 << 20)).SerializeToString()


def _continuation(size: int) -> bytes:
    return pb.ScoreRequest(prompt="a", continuations=[pb.Continuation(text="a" * size)]).SerializeToString()


GRPC = (
    Attack("empty messages", GENERATE, _within(pb.GenerateRequest, "chat.messages", b"")),
    Attack("empty messages in a batch", BATCH, _within(pb.GenerateRequest, "chat.messages", b"")),
    Attack("empty messages to tokenize", TOKENIZE, _within(pb.TokenizeRequest, "chat.messages", b"")),
    Attack("calls of a message", GENERATE, _within(pb.GenerateRequest, "chat.messages.tool_calls", b"")),
    Attack("arguments of a call", GENERATE, _arguments),
    Attack("empty tools", GENERATE, _within(pb.GenerateRequest, "chat.tools", b"")),
    Attack("template variables", GENERATE, _within(pb.GenerateRequest, "chat.template_variables.fields", b"")),
    Attack("nulls in a message", GENERATE, _value),
    Attack("the prompt again and again", GENERATE, _within(pb.GenerateRequest, "prompt", b"a")),
    Attack("ids one by one", GENERATE, _ones),
    Attack("ids", GENERATE, _packed(pb.GenerateRequest, "token_ids.ids")),
    Attack("a long text", GENERATE, _prompt("a")),
    Attack("stop strings", GENERATE, _within(pb.GenerateRequest, "sampling.stop", b"a")),
    Attack("allowed tokens", GENERATE, _packed(pb.GenerateRequest, "sampling.allowed_token_ids.ids")),
    Attack("unknown fields", GENERATE, lambda size: b"\xf8\x07\x00" * (size // 3)),
    Attack("unknown groups", GENERATE, lambda size: (b"\xfb\x07" * 60 + b"\xfc\x07" * 60) * (size // 240)),
    Attack("empty continuations", SCORE, _within(pb.ScoreRequest, "continuations", b"")),
    Attack("a long continuation", SCORE, _continuation),
    Attack("text to tokenize", TOKENIZE, lambda size: _within(pb.TokenizeRequest, "text", b"a" * size)(size + 9)),
    Attack("tokens to detokenize", DETOKENIZE, _packed(pb.DetokenizeRequest, "token_ids")),
    Attack("empty tensors", INFER, _infer(_within(oip.ModelInferRequest, "inputs", b""))),
    Attack("empty parameters", INFER, _infer(_within(oip.ModelInferRequest, "parameters", b""))),
    Attack("empty raw contents", INFER, _infer(_within(oip.ModelInferRequest, "raw_input_contents", b""))),
    Attack("a long shape", INFER, _infer(_packed(oip.ModelInferRequest, "inputs.shape"))),
    Attack("sampling parameters", INFER, _sampling),
)  # fmt: skip
