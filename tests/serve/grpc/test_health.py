"""Tests of grpc.health.v1 and reflection with generic clients."""

import asyncio

import grpc
from google.protobuf import descriptor_pool, json_format
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jaxinfer.protos.oip import open_inference_pb2
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.frontend.frontend import Frontend
from tests.serve.fake_engine import expected_text, fake_tokenizer
from tests.serve.grpc.running import failure, running

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
READINESS = "jaxinfer.v1.Inference"


async def check(health: HealthStub, service: str) -> int:
    return (await health.Check(pb.HealthCheckRequest(service=service))).status


def test_check_and_list() -> None:
    async def story() -> None:
        async with running() as server:
            health, operators = HealthStub(server.channel), HealthStub(server.control_channel)
            assert [await check(health, name) for name in ("", READINESS)] == [SERVING, SERVING]
            assert [await check(operators, name) for name in ("", "jaxinfer.v1.Control")] == [SERVING, SERVING]
            for state in ("starting", "dead", "stopped"):
                server.supervisor.state = state
                assert [await check(health, name) for name in ("", READINESS)] == [SERVING, NOT_SERVING]
            listed = (await health.List(pb.HealthListRequest())).statuses
            assert {name: each.status for name, each in listed.items()} == {"": SERVING, READINESS: NOT_SERVING}
            server.supervisor.state = "ready"
            assert await check(health, READINESS) == SERVING
            await server.frontend.leave(0.0)
            assert [await check(health, name) for name in ("", READINESS)] == [SERVING, NOT_SERVING]
            server.frontend.leaving = False
            server.frontend.draining = True
            assert [await check(health, name) for name in ("", READINESS)] == [SERVING, NOT_SERVING]
            found = await failure(health.Check(pb.HealthCheckRequest(service="other")))
            assert found.code is grpc.StatusCode.NOT_FOUND

    asyncio.run(story())


def test_watchers_hear_of_every_change() -> None:
    async def story() -> None:
        async with running() as server:
            health = HealthStub(server.channel)
            ready, alive, unknown = (
                health.Watch(pb.HealthCheckRequest(service=name)) for name in (READINESS, "", "other")
            )
            assert (await ready.read()).status == SERVING
            assert (await alive.read()).status == SERVING
            assert (await unknown.read()).status == pb.HealthCheckResponse.SERVICE_UNKNOWN
            for state, status in (("dead", NOT_SERVING), ("ready", SERVING), ("starting", NOT_SERVING)):
                server.supervisor.state = state
                async with asyncio.timeout(60):
                    assert (await ready.read()).status == status
            stopping = asyncio.create_task(server.servers.stop(5))
            assert (await alive.read()).status == NOT_SERVING
            assert await alive.read() is grpc.aio.EOF
            await ready.read()
            await unknown.read()
            async with asyncio.timeout(4):  # watchers do not delay the stop until the grace period ends
                await stopping

    asyncio.run(story())


def test_nothing_is_ready_before_there_is_a_front_end() -> None:
    def none_yet() -> Frontend:
        raise ServeError(Kind.UNAVAILABLE, "the model is being loaded")

    async def story() -> None:
        async with running(frontend=lambda made: none_yet) as server:
            server.supervisor.state = "starting"
            health = HealthStub(server.channel)
            assert [await check(health, name) for name in ("", READINESS)] == [SERVING, NOT_SERVING]

    asyncio.run(story())


def test_a_client_without_our_protos_generates_by_reflection() -> None:
    def client(port: int) -> str:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert set(database.get_services()) >= {READINESS, "grpc.health.v1.Health"}
            service = descriptor_pool.DescriptorPool(database).FindServiceByName(READINESS)
            method = service.methods_by_name["Generate"]
            asked, answered = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            request = json_format.ParseDict({"prompt": "Hi", "sampling": {"maxTokens": 30, "seed": 2}}, asked())
            call = channel.unary_stream(
                f"/{READINESS}/{method.name}", asked.SerializeToString, answered.FromString, _registered_method=False
            )
            return "".join(response.delta.text for response in call(request))

    async def story() -> None:
        async with running() as server:
            text = await asyncio.to_thread(client, server.servers.port)
            assert text == expected_text(fake_tokenizer().encode("Hi"), 2, 0, 30)

    asyncio.run(story())


def test_reflection_knows_services_of_other_pools() -> None:
    service = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]

    class Servicer:
        def __getattr__(self, name: str) -> object:
            return lambda *_: None

    def client(port: int) -> list[str]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            return [method.name for method in pool.FindServiceByName(service.full_name).methods]

    async def story() -> None:
        async with running(more=lambda frontend: [(service, Servicer())]) as server:
            found = await asyncio.to_thread(client, server.servers.port)
            assert found == [method.name for method in service.methods]

    asyncio.run(story())
