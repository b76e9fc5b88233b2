"""The corpus of bad input, over both APIs of a whole server: each entry gets its error without side effects."""

import asyncio
import json
import math
import time

import pytest
from fastapi.routing import APIRoute
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from grpc_reflection.v1alpha import reflection_pb2
from starlette.routing import Route

from jaxinfer.protos.oip import open_inference_pb2
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.grpc.auth import OPEN as OPEN_RPC
from jaxinfer.serve.grpc.auth import SCOPES as RPC_SCOPES
from jaxinfer.serve.http.app import SCOPES as ROUTES
from jaxinfer.serve.http.app import build_app
from jaxinfer.serve.http.app_state import AppState
from tests.serve import corpus
from tests.serve.doors import (
    COMPLETIONS,
    CONTROL,
    GENERATE,
    METHODS,
    VLLM_METHODS,
    Doors,
    Page,
    Rpc,
    doors,
    request_class,
)
from tests.serve.fake_engine import expected_text, fake_tokenizer
from tests.serve.processes import ServerProcess, fake_server

CORPUS = corpus.load()
FIELDS = pb.SamplingParams.DESCRIPTOR.fields_by_name
INFERENCE = "jaxinfer.v1.Inference/"
SCOPES = ("infer", "observe", "admin")
FREE = {path for path, scope in ROUTES.items() if scope is None}
REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
NORMAL = {"prompt": "Hi", "max_tokens": 9, "seed": 1}
SPARE_SECONDS = 30.0  # allowance for a busy machine; a hang takes longer still


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Return a key file, the key with all scopes, and a key for each scope."""
    found = {"all": new_key(), **{scope: new_key() for scope in SCOPES}}
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    scopes = {"all": SCOPES} | {scope: (scope,) for scope in SCOPES}
    file.write_text("".join(key_entry(key, name, scopes[name]) for name, key in found.items()))
    return file, found


@pytest.fixture(scope="module")
def server(tmp_path_factory, keys):
    with fake_server(tmp_path_factory.mktemp("server"), api_keys=str(keys[0]), **CORPUS["server"]) as process:
        yield process
        _nothing_went_wrong(process)


@pytest.fixture(scope="module")
def lenient(tmp_path_factory):
    """Yield a server that accepts request templates."""
    seconds = CORPUS["template_seconds"]
    folder = tmp_path_factory.mktemp("lenient")
    with fake_server(folder, allow_request_templates=True, template_seconds=seconds) as process:
        yield process
        _nothing_went_wrong(process)


def _nothing_went_wrong(process: ServerProcess):
    assert process.process.poll() is None
    log = process.log()
    assert "internal error" not in log, log[-3000:]
    assert "Traceback" not in log, log[-3000:]


def run(server, keys, story):
    """Run a story with a client; afterwards a normal request is served and no state is left."""

    async def whole():
        async with doors(server, keys) as client:
            await story(client)
            await check_normal(client)

    asyncio.run(whole())


async def check_normal(client: Doors):
    text = expected_text(fake_tokenizer().encode("Hi"), 1, 0, 9)
    asked = pb.GenerateRequest(prompt="Hi", sampling={"max_tokens": 9, "seed": 1})
    answer = await client.rpc(GENERATE, asked.SerializeToString())
    assert answer.code == "OK", answer
    assert "".join(pb.GenerateResponse.FromString(raw).delta.text for raw in answer.messages) == text
    page = await client.http("POST", COMPLETIONS, json.dumps(NORMAL).encode())
    assert page.status == 200, page
    assert json.loads(page.body)["choices"][0]["text"] == text
    await client.baseline()


# ---- cases


@pytest.mark.parametrize("case", CORPUS["cases"], ids=lambda case: case["name"])
def test_case(case, server, keys):
    assert case.keys() & {"grpc", "http"}

    async def story(client):
        if "grpc" in case:
            await check_grpc(client, **case["grpc"])
        if "http" in case:
            await check_http(client, **case["http"])

    run(server, keys[1]["all"], story)


async def check_grpc(
    client: Doors,
    *,
    rpc="Generate",
    request=None,
    raw=None,
    number=None,
    metadata=None,
    code="INVALID_ARGUMENT",
    field=None,
    says="",
    raw_connection=None,
):
    if raw_connection is not None:
        assert (await client.raw(raw_connection.encode(), client.server.grpc_port)).status == 0
        return
    path = rpc if "/" in rpc else INFERENCE + rpc
    given = None if metadata is None else [("authorization", f"Bearer {client.key}"), *metadata.items()]
    data = message(path, request, number) if raw is None else raw.encode() if isinstance(raw, str) else raw
    check_rpc(await client.rpc(path, data, metadata=given), code, field, says)


@pytest.mark.parametrize(
    "path", ["jaxinfer.v1.Inference/GenerateBatch", "inference.GRPCInferenceService/ModelStreamInfer"]
)
def test_no_request_at_all_behind_one_that_is_being_answered(path, server, keys):
    """The server sends its error for an empty request even while the first request of the stream is being answered."""

    async def story(client):
        for _ in range(20):
            answer = await client.rpc(path, b"", b"\0", timeout=20)
            if answer.message != "Internal error from Core":  # grpc.aio's client, if a stream ends before its writes
                assert answer.code == "INVALID_ARGUMENT", answer
                assert "is no valid" in answer.message

    run(server, keys[1]["all"], story)


def message(path, request, number) -> bytes:
    made = json_format.ParseDict(request, request_class(path)())
    if number is not None:  # values that JSON does not have
        made.chat.template_variables["x"] = number
    return made.SerializeToString()


def check_rpc(answer: Rpc, code: str, field: str | None, says: str = ""):
    assert answer.code == code, answer
    assert answer.fields == (() if field is None else (field,)), answer
    assert says in answer.message
    if code != "OK":
        assert not answer.messages
        assert 0 < len(answer.message) <= 1001


async def check_http(
    client: Doors,
    *,
    call=f"POST {COMPLETIONS}",
    json: object = None,
    body=None,
    raw=None,
    key=False,
    headers=None,
    status=400,
    field=None,
    says="",
):
    if raw is not None:
        data = raw.encode() if isinstance(raw, str) else raw
        host = f"Host: x\r\nAuthorization: Bearer {client.key}\r\n".encode()
        page = await client.raw(data.replace(b"Host: x\r\n", host) if key else data)
    else:
        method, path = call.split(" ", 1)
        data = encoded(json) if body is None else body.encode() if isinstance(body, str) else body
        page = await client.http(method, path, data, headers)
    check_page(page, status, field, says)


def encoded(value) -> bytes:
    return b"" if value is None else json.dumps(value).encode()


def check_page(page: Page, status: int, field: str | None, says: str = ""):
    assert page.status == status, page
    if status not in (0, 200):
        if "request_id" in json.loads(page.body):  # Anthropic's error format has only the message
            assert set(page.error) == {"message", "type"}
            assert page.error["message"].startswith(field or ""), page.body
        else:
            assert set(page.error) == {"message", "type", "param", "code"}
            assert page.error["param"] == field, page.body
        assert says in page.error["message"], page.body
        assert 0 < len(page.error["message"]) <= 1000


# ---- sampling


def test_every_field_of_sampling_is_in_the_corpus_with_what_is_no_number():
    assert set(CORPUS["sampling"]) == set(FIELDS)
    for name, values in CORPUS["sampling"].items():
        if FIELDS[name].type == FieldDescriptor.TYPE_DOUBLE:
            assert any(math.isnan(value) for value in values["both"])
            assert {math.inf, -math.inf} <= set(values["both"])


@pytest.mark.parametrize("name", CORPUS["sampling"])
def test_sampling(name, server, keys):
    values = CORPUS["sampling"][name]

    async def story(client):
        for value in values["both"]:
            check_rpc(await client.rpc(GENERATE, sampling_message(name, value)), "INVALID_ARGUMENT", name)
        for value in values["both"] + values["json"]:
            page = await client.http("POST", COMPLETIONS, encoded({"prompt": "Hi", **sampling_json(name, value)}))
            check_page(page, 400, name if expressible(value) else None)

    run(server, keys[1]["all"], story)


def sampling_message(name, value) -> bytes:
    request = pb.GenerateRequest(prompt="Hi", sampling={"max_tokens": 16})
    if name == "logit_bias":
        for token, bias in value.items():
            request.sampling.logit_bias[int(token)] = bias
    elif name == "allowed_token_ids":
        request.sampling.allowed_token_ids.SetInParent()
        request.sampling.allowed_token_ids.ids.extend(value["ids"])
    elif isinstance(value, list):
        field = getattr(request.sampling, name)
        getattr(field, "ids", field).extend(value)
    elif name == "structured_outputs":
        request.sampling.structured_outputs.MergeFrom(pb.StructuredOutputs(**value))
    elif name == "speculation":
        request.sampling.speculation.MergeFrom(pb.Speculation(**value))
    else:
        setattr(request.sampling, name, value)
    return request.SerializeToString()


def sampling_json(name, value):
    return {name: value["ids"] if name == "allowed_token_ids" and isinstance(value, dict) and value else value}


def expressible(value) -> bool:
    """Return whether JSON can represent the value."""
    numbers = value.values() if isinstance(value, dict) else [value]
    return all(not isinstance(number, float) or math.isfinite(number) for number in numbers)


# ---- templates


@pytest.mark.parametrize("template", CORPUS["templates"], ids=lambda template: template["name"])
def test_a_bad_template_is_stopped_in_time_and_keeps_nobody_waiting(template, lenient):
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": template["source"]}
    request = pb.GenerateRequest(chat={"messages": [{"role": "user"}], "template": template["source"]})

    async def story(client):
        for door in ("grpc", "http"):
            start = time.monotonic()
            if door == "grpc":
                call = client.rpc(GENERATE, request.SerializeToString())
            else:
                call = client.http("POST", "/v1/chat/completions", encoded(body))
            asked = asyncio.ensure_future(call)
            chat = {"messages": body["messages"], "max_tokens": 1}
            page = await client.http("POST", "/v1/chat/completions", encoded(chat))
            others = time.monotonic() - start
            assert page.status == 200, page
            answer = await asked
            if isinstance(answer, Rpc):
                check_rpc(answer, "INVALID_ARGUMENT", "chat.messages", template["says"])
            else:
                check_page(answer, 400, "messages", template["says"])
            assert time.monotonic() - start < CORPUS["template_seconds"] + SPARE_SECONDS
            assert others < CORPUS["template_seconds"] + SPARE_SECONDS

    run(lenient, None, story)


def test_a_template_of_a_request_where_it_may(lenient):
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"

    async def story(client):
        chat = pb.TokenizeRequest(chat={"messages": [{"role": "user", "content": "狐"}], "template": source})
        answer = await client.rpc(f"{INFERENCE}Tokenize", chat.SerializeToString())
        assert answer.code == "OK", answer
        ids = fake_tokenizer().encode("狐")
        assert list(pb.TokenizeResponse.FromString(answer.messages[0]).token_ids) == ids
        body = {"messages": [{"role": "user", "content": "狐"}], "chat_template": source}
        page = await client.http("POST", "/tokenize", encoded(body))
        assert json.loads(page.body)["tokens"] == ids

    run(lenient, None, story)


# ---- keys


def routes():
    """Return path and method of all routes."""
    found = [route for route in build_app(AppState("0")).inner.routes if isinstance(route, Route | APIRoute)]
    assert found
    return [(route.path, method) for route in found for method in sorted((route.methods or set()) - {"HEAD"})]


def wrong_headers(right: str):
    """Yield Authorization headers that are not valid."""
    yield {"Authorization": ""}
    for text in (
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {right}",
        right,
        f"Bearer {right}x",
        f"Bearer {right[:-1]}",
    ):
        yield {"Authorization": text}
    yield {"Authorization": f"Bearer wrong\r\nAuthorization: Bearer {right}"}
    yield {"Authorization": "Bearer " + "x" * 10_000}


def wrong_api_keys(right: str):
    """Yield X-Api-Key headers (of Anthropic's clients) that are not valid."""
    yield {"Authorization": "", "X-Api-Key": "wrong"}
    yield {"Authorization": "", "X-Api-Key": f"wrong\r\nX-Api-Key: {right}"}
    yield {"Authorization": "", "X-Api-Key": f"Bearer {right}"}
    yield {"Authorization": "Bearer wrong", "X-Api-Key": right}
    yield {"Authorization": f"Bearer {right}", "X-Api-Key": "wrong"}


def test_a_wrong_key_on_every_route(server, keys):
    async def story(client):
        for path, method in routes():
            url = path.replace("{model:path}", "fake")
            for headers in (*wrong_headers(client.key), *wrong_api_keys(client.key)):
                page = await client.http(method, url, headers=headers)
                if path in FREE:
                    assert page.status == 200, (path, headers)
                else:
                    assert page.status == 401, (path, headers, page)
                    assert page.headers["www-authenticate"] == "Bearer"
                    check_page(page, 401, None)
            lacking = [scope for scope in SCOPES if await refused(client, method, url, keys[1][scope])]
            assert len(lacking) == (0 if path in FREE else 2), (path, lacking)

    run(server, keys[1]["all"], story)


async def refused(client: Doors, method: str, url: str, key: str) -> bool:
    page = await client.http(method, url, headers={"Authorization": f"Bearer {key}"})
    assert page.status != 401
    return page.status == 403


def test_a_wrong_key_on_every_rpc(server, keys):
    async def story(client):
        names = await served(client, client.inference) | await served(client, client.control)
        paths = {path for path in METHODS | VLLM_METHODS if path.split("/")[0] in names}
        assert {path.split("/")[0] for path in paths} == names, "a service is served that no descriptor here has"
        assert paths == set(RPC_SCOPES)
        for path in sorted(paths):
            free = RPC_SCOPES[path] is OPEN_RPC
            for headers in wrong_headers(client.key):
                values = headers["Authorization"].split("\r\nAuthorization: ")
                metadata = [("authorization", value) for value in values if value]
                answer = await client.rpc(path, b"", metadata=metadata, most=1)
                assert (answer.code == "UNAUTHENTICATED") != free, (path, headers, answer)
            codes = [await code_with(client, path, keys[1][scope]) for scope in SCOPES if path != f"{CONTROL}Drain"]
            if codes:
                assert codes.count("PERMISSION_DENIED") == (0 if free else 2), (path, codes)

    run(server, keys[1]["all"], story)


async def served(client: Doors, channel) -> set[str]:
    """Return the services listed by reflection."""
    asked = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    call = channel.stream_stream(f"/{REFLECTION}")(iter([asked]), metadata=[("authorization", f"Bearer {client.key}")])
    answer = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
    call.cancel()
    return {service.name for service in answer.list_services_response.service}


async def code_with(client: Doors, path: str, key: str) -> str:
    return (await client.rpc(path, b"", metadata=[("authorization", f"Bearer {key}")], most=1)).code


def test_all_services_have_their_descriptors_here():
    assert open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name + "/ModelInfer" in METHODS
