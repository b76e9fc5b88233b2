"""Two tenants of one server, and every request and response that a tenant can access.

`PROBES` has a probe for each RPC and route that the scope `infer` allows; a test checks that none is missing. A probe
returns the whole response: fields of messages and of JSON by name, headers, metadata and status, except the date.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from jaxinfer.serve.api.auth import Authoriser, key_entry
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.oip import SERVICE, OpenInference
from jaxinfer.serve.grpc.server import GrpcServers
from jaxinfer.serve.http.app import build_app
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.server import HttpServer
from jaxinfer.serve.settings import ServeConfig
from tests.serve.doors import METHODS, VLLM, VLLM_METHODS
from tests.serve.fake_engine import FakeEngine, fake_card, fake_template, fake_tokenizer, write_fake_folder
from tests.serve.grpc.running import FakeSupervisor, plain
from tests.serve.grpc.vllm.serving import State, vllm_service

ALICE, BOB, OPERATOR = "jaxinfer-alice", "jaxinfer-bob", "jaxinfer-operator"
UNTOLD = ("date",)  # headers that depend only on the clock
SECONDS = 60.0


@dataclasses.dataclass
class Tenancy:
    """A server over the fake engine, or over another engine with the same methods."""

    channel: aio.Channel
    control: aio.Channel
    http: httpx.AsyncClient
    frontend: Frontend
    engine: Any


@contextlib.asynccontextmanager
async def tenancy(
    folder: pathlib.Path,
    engine: FakeEngine | None = None,
    *,
    groups: Mapping[str, str | None] | None = None,
    **more: Any,
) -> AsyncIterator[Tenancy]:
    """Yield a server with keys of alice, bob and an operator. ``groups``: cache groups; ``more``: for `Frontend`."""
    groups, folder = groups or {}, pathlib.Path(folder)
    named = (("alice", ALICE, ["infer"]), ("bob", BOB, ["infer"]), ("op", OPERATOR, ["observe", "admin"]))
    given = [(key, name, scopes, *([groups[name]] if name in groups else [])) for name, key, scopes in named]
    (folder / "keys.yaml").write_text("".join(key_entry(*each) for each in given))
    keys, engine = Authoriser(folder / "keys.yaml"), engine or FakeEngine()
    config = ServeConfig(model="fake", grpc_port=0, http_port=0, control_port=0)
    async with contextlib.AsyncExitStack() as stack:
        backend = await stack.enter_async_context(AsyncEngine(engine))
        frontend = Frontend(backend, fake_card(engine.config), fake_tokenizer(), fake_template(), **more)
        stack.push_async_callback(frontend.aclose)
        oip = [(SERVICE, OpenInference(lambda: frontend, lambda: True))]
        vllm = vllm_service(lambda: frontend, State(folder=write_fake_folder(folder / "model")))
        rpcs = GrpcServers(config, lambda: frontend, FakeSupervisor(), keys, more=oip + vllm)
        await rpcs.start()
        stack.push_async_callback(rpcs.stop, 0)
        door = AppState(version="1", authoriser=keys, frontend=frontend)
        pages = HttpServer(config, door, build_app(door))
        await pages.start()
        stack.push_async_callback(pages.stop)
        channel = await stack.enter_async_context(plain(rpcs.port))
        control = await stack.enter_async_context(plain(rpcs.control_port or 0))
        url = f"http://127.0.0.1:{pages.port}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=SECONDS))
        yield Tenancy(channel, control, http, frontend, engine)


# ---- requests

Asked = tuple[str, Any]  # an RPC or a route, and the request
Probe = Callable[[str], Asked]
SAMPLING = {"max_tokens": 1, "seed": 1, "n": 2, "logprobs": 2}


def _generate(**more: Any) -> Probe:
    return lambda text: ("jaxinfer.v1.Inference/Generate", [{"prompt": text, "requestId": "r", **_sampled(), **more}])


def _sampled(**more: Any) -> dict[str, Any]:
    return {"sampling": {"maxTokens": 1, "seed": 1, "n": 2, "logprobs": 2, **more}}


def _batch(text: str) -> Asked:
    return "jaxinfer.v1.Inference/GenerateBatch", [{"prompt": text, "requestId": "r", **_sampled()}]


def _chat(text: str) -> Asked:
    chat = {"messages": [{"role": "user", "content": text}]}
    return "jaxinfer.v1.Inference/Generate", [{"chat": chat, "requestId": "r", **_sampled()}]


def _infer(name: str, *, stream: bool) -> Probe:
    def asked(text: str) -> Asked:
        inputs = [_tensor("text_input", "BYTES", bytesContents=[_base64(text)])]
        inputs.append(_tensor("stream", "BOOL", boolContents=[stream]))
        inputs += [_tensor(f"return_{what}", "BOOL", boolContents=[True]) for what in RETURNS]
        parameters = {"max_tokens": {"int64Param": "1"}, "seed": {"int64Param": "1"}}
        sent = {"modelName": "fake", "id": "r", "inputs": inputs, "parameters": parameters}
        return f"inference.GRPCInferenceService/{name}", [sent]

    return asked


RETURNS = ("finish_reason", "num_input_tokens", "num_output_tokens")


def _tensor(name: str, kind: str, **contents: Any) -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": ["1"], "contents": contents}


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _vllm(**more: Any) -> Probe:
    def asked(text: str) -> Asked:
        sent = {"requestId": "r", "text": text, "samplingParams": _sampled()["sampling"], **more}
        return VLLM + "Generate", [{name: value for name, value in sent.items() if value is not None}]

    return asked


def _said(rpc: str, /, **sent: Any) -> Probe:
    """Return a probe; ``{text}`` in the request is the prompt."""
    return lambda text: (rpc, [json.loads(json.dumps(sent).replace("{text}", text))])


def _posted(path: str, /, **sent: Any) -> Probe:
    return lambda text: (path, json.loads(json.dumps(sent).replace("{text}", text)))


_RPC, _OIP = "jaxinfer.v1.Inference/", "inference.GRPCInferenceService/"
_MESSAGES = [{"role": "user", "content": "{text}"}]
_ASKED = {**SAMPLING, "request_id": "r", "return_token_ids": True}
_CHATTED = {**_ASKED, "logprobs": True, "top_logprobs": 2}
_MESSAGED = {"max_tokens": 1, "seed": 1, "request_id": "r"}
_RESPONDED = {"max_output_tokens": 1, "seed": 1, "request_id": "r", "include": ["message.output_text.logprobs"]}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}

PROBES: dict[str, Probe] = {
    "generate": _generate(),
    "generate, from ids": lambda text: (
        _RPC + "Generate",
        [{"tokenIds": {"ids": [3 + b for b in text.encode()]}, "requestId": "r", **_sampled()}],
    ),
    "generate, prompt logprobs": _generate(**_sampled(promptLogprobs=1)),
    "generate, salted": _generate(cacheSalt="pepper"),
    "generate, counted": _generate(**_sampled(presencePenalty=0.5)),
    "generate, chat": _chat,
    "batch": _batch,
    "score": _said(_RPC + "Score", prompt="{text}", continuations=[{"text": "bc"}]),
    "tokenize": _said(_RPC + "Tokenize", text="{text}"),
    "tokenize, chat": _said(_RPC + "Tokenize", chat={"messages": _MESSAGES}),
    "detokenize": lambda text: (_RPC + "Detokenize", [{"tokenIds": [3 + b for b in text.encode()]}]),
    "model": _said(_RPC + "GetModelInfo"),
    "infer": _infer("ModelInfer", stream=False),
    "infer, stream": _infer("ModelStreamInfer", stream=True),
    "model, ready": _said(_OIP + "ModelReady", name="fake"),
    "model, metadata": _said(_OIP + "ModelMetadata", name="fake"),
    "server, metadata": _said(_OIP + "ServerMetadata"),
    "reflection": _said("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", listServices=""),
    "vllm": _vllm(),
    "vllm, stream": _vllm(stream=True),
    "vllm, prompt logprobs": _vllm(samplingParams=_sampled(promptLogprobs=1)["sampling"]),
    "vllm, from ids": lambda text: _vllm(tokenized={"inputIds": [3 + b for b in text.encode()]}, text=None)(text),
    "vllm, abort": _said(VLLM + "Abort", requestIds=["r", "{text}"]),
    "vllm, model": _said(VLLM + "GetModelInfo"),
    "vllm, tokenizer": _said(VLLM + "GetTokenizer"),
    "vllm, embed": _said(VLLM + "Embed", requestId="r"),
    "completions": _posted("/v1/completions", prompt="{text}", **_ASKED),
    "completions, listed": _posted("/v1/completions", prompt=["{text}"], **_ASKED),
    "completions, echo": _posted("/v1/completions", prompt="{text}", echo=True, **_ASKED),
    "completions, stream": _posted("/v1/completions", prompt="{text}", **_ASKED, **_USAGE),
    "chat": _posted("/v1/chat/completions", messages=_MESSAGES, **_CHATTED),
    "chat, stream": _posted("/v1/chat/completions", messages=_MESSAGES, **_CHATTED, **_USAGE),
    "responses": _posted("/v1/responses", input="{text}", **_RESPONDED),
    "responses, stream": _posted("/v1/responses", input="{text}", **_RESPONDED, stream=True),
    "messages": _posted("/v1/messages", messages=_MESSAGES, **_MESSAGED),
    "messages, stream": _posted("/v1/messages", messages=_MESSAGES, **_MESSAGED, stream=True),
    "messages, counted": _posted("/v1/messages/count_tokens", messages=_MESSAGES),
    "http tokenize": _posted("/tokenize", prompt="{text}", return_token_strs=True),
    "http detokenize": lambda text: ("/detokenize", {"tokens": [3 + b for b in text.encode()]}),
    "models": lambda _: ("/v1/models", None),
    "one model": lambda _: ("/v1/models/fake", None),
    "version": lambda _: ("/version", None),
    "docs": lambda _: ("/docs", None),
    "a file of docs": lambda _: ("/docs/swagger-ui.css", None),
    "openapi": lambda _: ("/openapi.json", None),
}


async def ask(server: Tenancy, key: str, asked: Asked) -> Any:
    """Send a request; return the whole response."""
    where, sent = asked
    if where.startswith("/"):
        return await _http(server.http, key, where, sent)
    return await _rpc(server.channel, key, where, sent)


async def _rpc(channel: aio.Channel, key: str, path: str, sent: Sequence[Mapping[str, Any]]) -> Any:
    method = (METHODS | VLLM_METHODS)[path]
    kind, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    messages = [ParseDict(each, kind()).SerializeToString() for each in sent]
    metadata = (("authorization", f"Bearer {key}"), ("traceparent", ""))
    if method.client_streaming:
        call = channel.stream_stream(f"/{path}")(iter(messages), metadata=metadata, timeout=SECONDS)
    else:
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = make(f"/{path}")(messages[0], metadata=metadata, timeout=SECONDS)
    try:
        if method.server_streaming:
            came = [each async for each in call]
        else:
            came = [await call]
        said = [MessageToDict(answer.FromString(each)) for each in came]
    except aio.AioRpcError:
        said = []
    heads = [
        sorted((k, str(v)) for k, v in (await part() or ())) for part in (call.initial_metadata, call.trailing_metadata)
    ]
    return [str(await call.code()), await call.details(), heads, said]


async def _http(http: httpx.AsyncClient, key: str, path: str, sent: Any) -> Any:
    method = "GET" if sent is None else "POST"
    answer = await http.request(
        method, path, json=sent, headers={"authorization": f"Bearer {key}", "x-request-id": "h"}
    )
    heads = sorted((name, value) for name, value in answer.headers.items() if name not in UNTOLD)
    return [answer.status_code, heads, [_timeless(line) for line in answer.text.splitlines()]]


def _timeless(line: str) -> Any:
    """Return a line of JSON, or the data of an event, without its creation time."""
    text = line.removeprefix("data: ")
    try:
        found = json.loads(text)
    except ValueError:
        return line
    for each in (found, found.get("response")) if isinstance(found, dict) else ():
        for name in ("created", "created_at", "completed_at"):
            (each or {}).pop(name, None)
    return found


def usage(told: Any, name: str) -> list[int]:
    """Return all numbers of a field in ``told``, at any depth."""
    found: list[int] = []
    todo = [told]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            found += [int(value) for key, value in each.items() if key == name]
            todo += list(each.values())
        elif isinstance(each, list | tuple):
            todo += list(each)
    return found


def auc(first: Sequence[float], second: Sequence[float]) -> float:
    """Return how often a value of ``first`` exceeds one of ``second`` (ties half): 0.5 no information, 1 separable."""
    wins = sum((a > b) + (a == b) / 2 for a in first for b in second)
    return wins / (len(first) * len(second))


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 4 * SECONDS))
