"""A gRPC server whose model returns scripted answers, see `tests.serve.http.scripted`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from jaxinfer.client import AsyncClient, Client
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.server import GrpcServers
from jaxinfer.serve.settings import ServeConfig
from tests.serve.grpc.running import FakeSupervisor, Keys, plain
from tests.serve.http.scripted import speaker


@dataclasses.dataclass
class Speaking:
    """A running server with its client."""

    port: int
    frontend: Frontend
    inference: Any

    def client(self) -> Client:
        return Client(f"127.0.0.1:{self.port}", timeout=20)

    def aio(self) -> AsyncClient:
        return AsyncClient(f"127.0.0.1:{self.port}", timeout=20)


@contextlib.asynccontextmanager
async def speaking(*answers: str, **how: Any) -> AsyncIterator[Speaking]:
    """Yield a server with these answers. ``how``: see `speaker`."""
    async with contextlib.AsyncExitStack() as stack:
        frontend, _ = await stack.enter_async_context(speaker(*answers, **how))
        stack.push_async_callback(frontend.aclose)
        config = ServeConfig(model="fake", grpc_port=0, control_port=0, drain_seconds=5.0)
        servers = GrpcServers(config, lambda: frontend, FakeSupervisor(), Keys())
        await servers.start()
        stack.push_async_callback(servers.stop, 0)
        channel = await stack.enter_async_context(plain(servers.port))
        yield Speaking(servers.port, frontend, InferenceStub(channel))
