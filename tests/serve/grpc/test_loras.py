"""Tests of LoRA adapters over gRPC: scopes for loading, access to names, and the status of each error."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from jaxinfer.protos.oip import open_inference_pb2 as oip
from jaxinfer.protos.oip.open_inference_pb2_grpc import GRPCInferenceServiceStub
from jaxinfer.protos.v1 import control_pb2 as control
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.frontend.loras import LoRAs
from jaxinfer.serve.grpc.oip import SERVICE, OpenInference
from jaxinfer.types import Request
from tests.lora.fakes import write_number
from tests.serve.grpc.running import Failure, Running, failure, refusal, request, running, unpacked

BASE = "fake"


@contextlib.asynccontextmanager
async def serving(folder: pathlib.Path, root: bool = True, **how: Any) -> AsyncIterator[Running]:
    """Yield a server with the folders of two adapters, pirate and poet."""
    for content, name in enumerate(("pirate", "poet"), 1):
        write_number(folder / name, content)

    def loras(engine: AsyncEngine) -> LoRAs:
        return LoRAs(engine, root=folder if root else None)

    def more(frontend: Callable[[], Any]) -> list[Any]:
        return [(SERVICE, OpenInference(frontend, lambda: True))]

    async with running(loras=loras, more=more, **how) as server:
        yield server


def load(name: str, path: str, **fields: Any) -> control.LoadLoraRequest:
    return control.LoadLoraRequest(lora_name=name, lora_path=path, **fields)


def spied(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Return a list that receives the engine's requests."""
    found: list[Request] = []
    add = server.engine.add

    def noting(asked: Request) -> Any:
        found.append(asked)
        return add(asked)

    monkeypatch.setattr(server.engine, "add", noting)
    return found


def adapters(requests: list[Request]) -> list[str | None]:
    return [None if each.lora is None else each.lora.name for each in requests]


def test_what_is_loaded_is_listed_until_it_is_unloaded(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as server:
            assert not (await server.control.ListLoras(control.ListLorasRequest())).loras
            loaded = (await server.control.LoadLora(load("b", "poet"))).lora
            path = str((tmp_path / "poet").resolve())
            assert loaded == control.Lora(name="b", path=path, identity="2", rank=1, parent=BASE)
            await server.control.LoadLora(load("a", str(tmp_path / "pirate")))
            for model in ("a", BASE):
                info = await server.inference.GetModelInfo(pb.GetModelInfoRequest(model=model))
                assert (info.name, info.architecture) == (model, "FakeForCausalLM")
            listed = (await server.control.ListLoras(control.ListLorasRequest())).loras
            assert [(each.name, each.identity) for each in listed] == [("a", "1"), ("b", "2")]
            await server.control.UnloadLora(control.UnloadLoraRequest(lora_name="b"))
            assert [each.name for each in (await server.control.ListLoras(control.ListLorasRequest())).loras] == ["a"]

    asyncio.run(story())


def test_a_name_is_loaded_again_in_place_alone(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as server:
            await server.control.LoadLora(load("a", "pirate"))
            for again in ({}, {"load_inplace": False}):
                found = await failure(server.control.LoadLora(load("a", "poet", **again)))
                assert found.code is grpc.StatusCode.ALREADY_EXISTS
                assert "'a'" in found.violations["lora_name"]
            both = [failure(server.control.LoadLora(load("new", "poet"))) for _ in range(2)]
            codes = {each.code for each in await asyncio.gather(*both)}
            assert codes == {grpc.StatusCode.OK, grpc.StatusCode.ALREADY_EXISTS}
            assert (await server.control.LoadLora(load("a", "poet", load_inplace=True))).lora.identity == "2"

    asyncio.run(story())


def test_the_answer_says_what_has_answered(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may name the adapter in ``model``; the response names the adapter that the engine used."""
    asks: list[tuple[dict[str, str], str]] = [
        ({}, BASE),
        ({"model": BASE}, BASE),
        ({"lora_name": "pirate"}, "pirate"),
        ({"model": "poet"}, "poet"),
        ({"model": BASE, "lora_name": "poet"}, "poet"),
        ({"model": "pirate", "lora_name": "pirate"}, "pirate"),
    ]

    async def story() -> None:
        async with serving(tmp_path) as server:
            for name in ("pirate", "poet"):
                await server.control.LoadLora(load(name, name))
            seen = spied(server, monkeypatch)
            for fields, name in asks:
                responses = [each async for each in server.inference.Generate(request(**fields))]
                assert responses[0].started.model == name
                assert adapters(seen) == [None if name == BASE else name]
                seen.clear()
            call = server.inference.GenerateBatch(
                iter([request(request_id=str(rank), **fields) for rank, (fields, _) in enumerate(asks)])
            )
            told = {r.request_id: r.started.model async for r in call if r.HasField("started")}
            assert told == {str(rank): name for rank, (_, name) in enumerate(asks)}
            assert sorted(map(str, adapters(seen))) == ["None", "None", "pirate", "pirate", "poet", "poet"]
            seen.clear()
            ask = pb.ScoreRequest(prompt="Hi", lora_name="poet", continuations=[pb.Continuation(text="a")])
            await server.inference.Score(ask)
            assert set(adapters(seen)) == {"poet"}
            await server.baseline()

    asyncio.run(story())


async def batch_failure(server: Running, ask: pb.GenerateRequest) -> Failure:
    """Return the error of a batch of one."""
    (response,) = [each async for each in server.inference.GenerateBatch(iter([ask]))]
    codes = {code.value[0]: code for code in grpc.StatusCode}
    error = response.error
    return Failure(codes[error.code], error.message, unpacked(error.details), {})


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"lora_name": "parrot"}, grpc.StatusCode.NOT_FOUND, "lora_name"),
        ({"lora_name": ""}, grpc.StatusCode.NOT_FOUND, "lora_name"),
        ({"lora_name": BASE}, grpc.StatusCode.NOT_FOUND, "lora_name"),
        ({"lora_name": "x" * 100_000}, grpc.StatusCode.NOT_FOUND, "lora_name"),
        ({"model": "parrot"}, grpc.StatusCode.NOT_FOUND, "model"),
        ({"model": "parrot", "lora_name": "poet"}, grpc.StatusCode.NOT_FOUND, "model"),
        ({"model": "pirate", "lora_name": "poet"}, grpc.StatusCode.INVALID_ARGUMENT, "lora_name"),
    ],
)
def test_names_that_mean_nothing(tmp_path: pathlib.Path, fields: dict, code: grpc.StatusCode, field: str) -> None:
    async def story() -> list[Failure]:
        async with serving(tmp_path) as server:
            for name in ("pirate", "poet"):
                await server.control.LoadLora(load(name, name))
            ask = pb.ScoreRequest(prompt="Hi", continuations=[pb.Continuation(text="a")], **fields)
            found = [
                await refusal(lambda: server.inference.Generate(request(**fields))),
                await batch_failure(server, request(**fields)),
                await failure(server.inference.Score(ask)),
            ]
            await server.baseline()
            return found

    for found in asyncio.run(story()):
        assert (found.code, list(found.violations)) == (code, [field])
        assert found.message.startswith(f"{field}=")
        assert len(found.message) < 500


@pytest.mark.parametrize(
    ("name", "path", "field"),
    [
        ("", "poet", "lora_name"),
        ("x" * 1000, "poet", "lora_name"),
        ("a\nb", "poet", "lora_name"),
        (BASE, "poet", "lora_name"),
        ("a", "", "lora_path"),
        ("a", "nowhere", "lora_path"),
        ("a", "../secret", "lora_path"),
        ("a", "/etc", "lora_path"),
        ("a", "x" * 100_000, "lora_path"),
        ("a", "broken", "lora_path"),
        ("a", "empty", "lora_path"),
    ],
)
def test_what_cannot_be_loaded_names_its_field(tmp_path: pathlib.Path, name: str, path: str, field: str) -> None:
    root = tmp_path / "root"
    write_number(root / "broken", 1).joinpath("adapter_config.json").write_text("no number")
    write_number(tmp_path / "secret", 3)
    (root / "empty").mkdir()

    async def story() -> tuple[Failure, int]:
        async with serving(root) as server:
            found = await failure(server.control.LoadLora(load(name, path)))
            return found, len((await server.control.ListLoras(control.ListLorasRequest())).loras)

    found, count = asyncio.run(story())
    assert (found.code, list(found.violations), count) == (grpc.StatusCode.INVALID_ARGUMENT, [field], 0)
    assert field in found.message


def test_unloading_what_is_not_there(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as server:
            for name in ("parrot", "", BASE):
                found = await failure(server.control.UnloadLora(control.UnloadLoraRequest(lora_name=name)))
                assert (found.code, list(found.violations)) == (grpc.StatusCode.NOT_FOUND, ["lora_name"])

    asyncio.run(story())


def test_a_server_without_a_folder_of_adapters_loads_none(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, root=False) as server:
            found = await failure(server.control.LoadLora(load("a", "poet")))
            assert found.code is grpc.StatusCode.FAILED_PRECONDITION
            assert "lora_root" in found.message
            assert not (await server.control.ListLoras(control.ListLorasRequest())).loras

    asyncio.run(story())


def test_a_server_without_adapters_says_so() -> None:
    async def story() -> list[Failure]:
        async with running() as server:
            return [
                await failure(server.control.LoadLora(load("a", "poet"))),
                await failure(server.control.UnloadLora(control.UnloadLoraRequest(lora_name="a"))),
                await failure(server.control.ListLoras(control.ListLorasRequest())),
                await refusal(lambda: server.inference.Generate(request(lora_name="a"))),
            ]

    for found in asyncio.run(story()):
        assert found.code is grpc.StatusCode.FAILED_PRECONDITION
        assert "enable_lora" in found.message


def test_adapters_are_the_operators_alone(tmp_path: pathlib.Path) -> None:
    keys = {"user": ("user", "infer"), "watcher": ("watcher", "observe"), "boss": ("boss", "admin,observe")}

    async def story() -> dict[str, list[grpc.StatusCode]]:
        async with serving(tmp_path, keys=keys) as server:
            codes: dict[str, list[grpc.StatusCode]] = {}
            for key in keys:
                key_of = (("authorization", f"Bearer {key}"),)
                calls = (  # one after the other
                    (server.control.LoadLora, load("a", "poet")),
                    (server.control.ListLoras, control.ListLorasRequest()),
                    (server.control.UnloadLora, control.UnloadLoraRequest(lora_name="a")),
                )
                codes[key] = [(await failure(call(ask, metadata=key_of))).code for call, ask in calls]
            assert (await refusal(lambda: server.inference.Generate(request()))).code.name == "UNAUTHENTICATED"
            path = "/jaxinfer.v1.Control/ListLoras"
            other_door = server.channel.unary_unary(path)
            assert (await failure(other_door(b""))).code is grpc.StatusCode.UNIMPLEMENTED
            return codes

    no, yes = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.OK
    assert asyncio.run(story()) == {"user": [no, no, no], "watcher": [no, yes, no], "boss": [yes, yes, yes]}


def test_the_open_inference_protocol_names_them_as_models(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = oip.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"Hi")

    async def story() -> None:
        async with serving(tmp_path) as server:
            stub: Any = GRPCInferenceServiceStub(server.channel)

            async def ready(name: str) -> bool:
                return bool((await stub.ModelReady(oip.ModelReadyRequest(name=name))).ready)

            assert [await ready(name) for name in (BASE, "poet")] == [True, False]
            await server.control.LoadLora(load("poet", "poet"))
            assert [await ready(name) for name in (BASE, "poet", "parrot")] == [True, True, False]
            assert (await stub.ModelMetadata(oip.ModelMetadataRequest(name="poet"))).name == "poet"
            seen = spied(server, monkeypatch)
            answer = await stub.ModelInfer(oip.ModelInferRequest(model_name="poet", inputs=[text]))
            assert (answer.model_name, adapters(seen)) == ("poet", ["poet"])
            await server.control.UnloadLora(control.UnloadLoraRequest(lora_name="poet"))
            for call in (
                stub.ModelInfer(oip.ModelInferRequest(model_name="poet", inputs=[text])),
                stub.ModelMetadata(oip.ModelMetadataRequest(name="poet")),
            ):
                found = await failure(call)
                assert (found.code, list(found.violations)) == (grpc.StatusCode.NOT_FOUND, ["model_name"])

    asyncio.run(story())
