"""A client that sends raw messages and raw bytes to all ports of a `tests.serve.processes.fake_server`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from jaxinfer.bench.http1 import HttpError, Pool, ResponseParser
from jaxinfer.protos.oip import open_inference_pb2
from jaxinfer.protos.v1 import control_pb2, inference_pb2
from jaxinfer.serve.grpc.vllm.messages import pb
from tests.serve.processes import ServerProcess

FILES = (inference_pb2, control_pb2, open_inference_pb2, health_pb2, reflection_pb2)
METHODS: dict[str, MethodDescriptor] = {
    f"{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
VLLM = "vllm.grpc.engine.VllmEngine/"
VLLM_METHODS = {VLLM + method.name: method for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods}
CONTROL = "jaxinfer.v1.Control/"
GENERATE = "jaxinfer.v1.Inference/Generate"
COMPLETIONS = "/v1/completions"
BOUND = 60.0  # seconds until a request counts as hung


@dataclasses.dataclass(frozen=True)
class Rpc:
    """Result of an RPC: its status name, message, the fields named in its details, and the responses received."""

    code: str
    message: str = ""
    fields: tuple[str, ...] = ()
    messages: Sequence[bytes] = ()


@dataclasses.dataclass(frozen=True)
class Page:
    """An HTTP response; status 0: the connection was closed without a complete response."""

    status: int
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""

    @property
    def error(self) -> Mapping[str, Any]:
        return json.loads(self.body)["error"]


@dataclasses.dataclass
class Doors:
    """Channels and connections to all ports; the key is sent with everything except raw bytes."""

    server: ServerProcess
    key: str | None
    inference: aio.Channel
    control: aio.Channel
    pool: Pool

    async def rpc(
        self,
        path: str,
        *requests: bytes,
        metadata: Sequence[tuple[str, str]] | None = None,
        timeout: float = BOUND,
        most: int | None = None,
    ) -> Rpc:
        """Call a method of any kind. ``metadata`` replaces the key; after ``most`` responses the call is cancelled."""
        channel = self.control if path.startswith(CONTROL) else self.inference
        given = [("authorization", f"Bearer {self.key}")] if metadata is None and self.key else metadata
        if len(requests) == 1:  # a stream of one request is the same on the wire
            call = channel.unary_stream(f"/{path}")(requests[0], metadata=given, timeout=timeout)
        else:
            call = channel.stream_stream(f"/{path}")(iter(requests), metadata=given, timeout=timeout)
        found: list[bytes] = []
        try:
            while (message := await call.read()) is not aio.EOF:
                found.append(message)
                if len(found) == most:
                    call.cancel()
                    return Rpc("OK", messages=found)
        except aio.AioRpcError as error:
            return Rpc(error.code().name, error.details() or "", _fields(error), found)
        return Rpc((await call.code()).name, messages=found)

    async def http(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Page:
        """Send a request. ``headers`` replace or extend the default ones."""
        given = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body))}
        given |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        given |= headers or {}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value)]
        whole, found = "\r\n".join([*lines, "", ""]).encode("latin-1") + body, bytearray()
        try:
            async with asyncio.timeout(BOUND):
                answer = await self.pool.exchange(whole, lambda _, data: found.extend(data))
        except (HttpError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            return Page(0, body=bytes(found))
        return Page(answer.status or 0, answer.headers, bytes(found))

    async def raw(self, data: bytes, port: int | None = None) -> Page:
        """Send bytes on a new connection; return the first response; with ``port``, wait for the connection's end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.server.http_port)
        parser, body = ResponseParser(), bytearray()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(BOUND):
                writer.write(data)
                while not parser.done and (got := await reader.read(65536)):
                    body += parser.feed(got) if port is None else b""
        writer.close()
        return Page((parser.status or 0) if parser.done else 0, parser.headers, bytes(body))

    async def stats(self) -> control_pb2.Stats:
        answer = await self.rpc(f"{CONTROL}GetStats", b"")
        assert answer.code == "OK", answer
        return control_pb2.Stats.FromString(answer.messages[0])

    async def baseline(self) -> None:
        """Wait until nothing runs or waits and no page is held."""
        async with asyncio.timeout(BOUND):
            while True:
                stats = await self.stats()
                if (stats.running, sum(stats.waiting.values()), stats.kv_pages["held"]) == (0, 0, 0):
                    return
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def doors(server: ServerProcess, key: str | None = None) -> AsyncIterator[Doors]:
    """Yield clients of all ports on separate connections."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    targets = [f"127.0.0.1:{port}" for port in (server.grpc_port, server.control_port)]
    pool = Pool("127.0.0.1", server.http_port, None, BOUND)
    async with (
        aio.insecure_channel(targets[0], options) as inference,
        aio.insecure_channel(targets[1], options) as control,
    ):
        try:
            yield Doors(server, key, inference, control, pool)
        finally:
            pool.close()


def request_class(path: str) -> type[Message]:
    """Return the request class of an RPC, by its full name."""
    return GetMessageClass(METHODS[path].input_type)


def _fields(error: aio.AioRpcError) -> tuple[str, ...]:
    packed = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    found: list[str] = []
    for detail in status_pb2.Status.FromString(packed if isinstance(packed, bytes) else b"").details:
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            found += [violation.field for violation in request.field_violations]
    return tuple(found)
