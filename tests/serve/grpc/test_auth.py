"""Tests of API keys and scopes for every RPC."""

import asyncio
from collections.abc import Callable

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from jaxinfer.protos.oip import open_inference_pb2
from jaxinfer.protos.v1 import control_pb2, inference_pb2
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.auth import OPEN, SCOPES, token_of
from jaxinfer.serve.grpc.bounds import Bounds
from jaxinfer.serve.grpc.oip import SERVICE, OpenInference
from jaxinfer.serve.grpc.rpc import Registrar, SlowClients
from jaxinfer.serve.grpc.vllm.messages import pb as vllm_pb
from tests.serve.grpc.running import Keys, Running, failure, failure_of, running
from tests.serve.grpc.vllm.serving import vllm_service

FILES = (inference_pb2, control_pb2, open_inference_pb2, health_pb2, reflection_pb2, vllm_pb)
METHODS = {
    f"{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
OPERATORS = ("jaxinfer.v1.Control/",)
KEYS = {
    "infers": ("a", "infer"),
    "observes": ("b", "observe"),
    "administers": ("c", "admin"),
    "nothing": ("d", ""),
}
CLIENTS_OWN = "Internal error from Core"
FREE = {
    "grpc.health.v1.Health/Check",
    "grpc.health.v1.Health/List",
    "grpc.health.v1.Health/Watch",
    "inference.GRPCInferenceService/ServerLive",
    "inference.GRPCInferenceService/ServerReady",
    "vllm.grpc.engine.VllmEngine/HealthCheck",
}


def test_the_table_has_every_method_and_only_health_is_free() -> None:
    assert set(SCOPES) == set(METHODS)
    assert {path for path, scope in SCOPES.items() if scope is OPEN} == FREE


def test_a_method_without_a_scope_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        service = control_pb2.DESCRIPTOR.services_by_name["Control"]
        registrar = Registrar(Keys(), SlowClients(1.0, 1.0), Bounds())
        shorter = {path: scope for path, scope in SCOPES.items() if not path.endswith("/Drain")}
        monkeypatch.setattr("jaxinfer.serve.grpc.rpc.SCOPES", shorter)
        with pytest.raises(KeyError, match="Control/Drain"):
            registrar.add(aio.server(), service, _Any())

    asyncio.run(story())


class _Any:
    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def test_every_method_wants_a_key_with_its_scope() -> None:
    def more(frontend: Callable[[], Frontend]) -> list:
        return [(SERVICE, OpenInference(frontend, lambda: True)), *vllm_service(frontend)]

    async def story() -> None:
        async with running(keys=KEYS, more=more) as server:
            for path, scope in SCOPES.items():
                for token, (_, scopes) in KEYS.items():
                    code = await answer(server, path, f"Bearer {token}")
                    allowed = scope is OPEN or scope in scopes.split(",")
                    assert (code is not grpc.StatusCode.PERMISSION_DENIED) == allowed, (path, token, code)
                    assert code is not grpc.StatusCode.UNAUTHENTICATED
                for wrong in (None, "Bearer wrong", "Bearer ", "infers", "Basic infers"):
                    code = await answer(server, path, wrong)
                    assert (code is grpc.StatusCode.UNAUTHENTICATED) == (scope is not OPEN), (path, wrong, code)

    asyncio.run(story())


async def answer(server: Running, path: str, authorization: str | None) -> grpc.StatusCode:
    """Return the status of an empty request; OK if a response comes. The call is repeated if grpc.aio's client replaces
    a status, received while it writes, by its own."""
    for _ in range(10):
        if (found := await _answer(server, path, authorization)) is not None:
            return found
    raise AssertionError(f"{path}: the client never got the server's status")


async def _answer(server: Running, path: str, authorization: str | None) -> grpc.StatusCode | None:
    channel = server.control_channel if path.startswith(OPERATORS) else server.channel
    method = METHODS[path]
    metadata = (("authorization", authorization),) if authorization is not None else ()
    if method.client_streaming:
        call = channel.stream_stream(f"/{path}")(iter([b""]), metadata=metadata)
    elif method.server_streaming:
        call = channel.unary_stream(f"/{path}")(b"", metadata=metadata)
    else:
        return (await failure(channel.unary_unary(f"/{path}")(b"", metadata=metadata))).code
    try:
        await call.read()
    except aio.AioRpcError as error:
        return None if error.details() == CLIENTS_OWN else failure_of(error).code
    call.cancel()
    return grpc.StatusCode.OK


def test_the_key_names_the_tenant() -> None:
    async def story() -> None:
        seen = []
        async with running(keys=KEYS) as server:
            generate = server.frontend.generate

            async def watched(call: object) -> object:
                seen.append(call)
                return await generate(call)

            server.frontend.generate = watched  # type: ignore[method-assign]
            asked = inference_pb2.GenerateRequest(prompt="a", sampling={"max_tokens": 1})
            metadata = (("authorization", "Bearer infers"),)
            await failure(server.inference.Generate(asked, metadata=metadata))
            await failure(server.inference.GenerateBatch(iter([asked]), metadata=metadata))
            assert [call.tenant for call in seen] == ["a", "a"]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("metadata", "token"),
    [((), None), ((("authorization", "Bearer k"),), "k"), ((("authorization", "bearer  k "), ("x", "y")), "k")],
)
def test_the_token_is_behind_bearer(metadata: tuple, token: str | None) -> None:
    assert token_of(metadata) == token


@pytest.mark.parametrize("values", [["k"], ["Bearer"], ["Basic k"], ["Bearer a", "Bearer b"], [b"Bearer k"]])
def test_another_form_is_refused(values: list) -> None:
    with pytest.raises(ServeError) as refusal:
        token_of([("authorization", value) for value in values])
    assert refusal.value.kind is Kind.UNAUTHENTICATED
