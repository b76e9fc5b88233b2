"""Tests of a server's file descriptors: settings too large for the system, and ports flooded with idle connections."""

import asyncio
import contextlib
import http.client
import logging
import os
import pathlib
import resource
import signal
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from jaxinfer.client import Client
from jaxinfer.serve.runtime import descriptors
from jaxinfer.serve.settings import ServeConfig, ServeConfigError
from tests.serve.core.fake_core import REPO
from tests.serve.grpc.wire import Wire
from tests.serve.processes import ServerProcess, fake_server, wait_until

ALL = {"http_port": 0, "metrics_port": 0, "control_port": 0}
FIXED = descriptors.RESERVE + 2 * descriptors.SPARE + 2 * descriptors.OPERATORS
FILES = 400
LEAST_FLOOD = 600


@pytest.mark.parametrize(("limit", "room"), [(FIXED + 2048, 1024), (FIXED + 2047, 1023), (FIXED + 33, 16)])
def test_connections_are_as_many_as_there_are_descriptors_for(
    limit: int, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServeConfig(model="fake", **ALL)
    with caplog.at_level(logging.WARNING):
        assert descriptors.within(config, limit).max_connections == room
    assert bool(caplog.records) == (room < 1024)
    assert room == 1024 or f"max_connections = 1024: {room} for each door" in caplog.text


def test_too_few_descriptors_are_refused_with_the_figures() -> None:
    config = ServeConfig(model="fake", **ALL)
    with pytest.raises(ServeConfigError, match=f"^max_connections = 1024: {FIXED + 31} files .*{FIXED + 32} or more"):
        descriptors.within(config, FIXED + 31)
    few = ServeConfig(model="fake", max_connections=2, http_port=None)
    assert descriptors.within(few, descriptors.RESERVE + 2) is few


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    program = (
        "import resource as r; from jaxinfer.serve.runtime.descriptors import raise_limit;"
        "r.setrlimit(r.RLIMIT_NOFILE, (100, 300)); print(raise_limit(), *r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["300", "300", "300"]


def healthy(server: ServerProcess) -> bool:
    """Return whether the server answers a health check on a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=10)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def lives(port: int) -> None:
    """Check gRPC health, with gRPC's own connection retries."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True)


def generates(server: ServerProcess) -> None:
    with Client(f"127.0.0.1:{server.grpc_port}") as client:
        client.wait_ready(timeout=60)
        assert client.generate("Hi", max_tokens=4, seed=1).text


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * LEAST_FLOOD, reason="few files may be open")
def test_idle_connections_close_no_door(tmp_path: pathlib.Path) -> None:
    """A server with more idle gRPC connections than file descriptors serves other clients and restarts its engine, and
    the log stays short."""

    async def story(server: ServerProcess) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for door in (server.grpc_port, server.control_port):
                for _ in range(LEAST_FLOOD // 2):
                    with contextlib.suppress(ConnectionError):
                        await stack.enter_async_context(await Wire.connect(door))
            assert await asyncio.to_thread(healthy, server)
            for door in (server.grpc_port, server.control_port):
                await asyncio.to_thread(lives, door)
            await asyncio.to_thread(generates, server)
            core = server.core
            assert core is not None
            os.kill(core, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: server.core not in (None, core))
            await asyncio.to_thread(generates, server)
            assert server.open_files() < FILES - 50

    with fake_server(tmp_path, files=FILES) as server:
        asyncio.run(story(server))
        assert len(server.log()) < 20_000, server.log()[:5000]
        assert "were idle longest and gave way" in server.log()


def test_who_was_served_stays_while_strangers_come_and_go(tmp_path: pathlib.Path) -> None:
    async def story(server: ServerProcess, client: Client) -> None:
        for _ in range(4):
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(40):
                    with contextlib.suppress(ConnectionError):
                        await stack.enter_async_context(await Wire.connect(server.grpc_port))
                await asyncio.to_thread(server.until_logged, "were idle longest and gave way")
                await asyncio.sleep(0.6)
                assert (await asyncio.to_thread(client.generate, "Hi", max_tokens=4, seed=1)).text

    with (
        fake_server(tmp_path, max_connections=16) as server,
        Client(f"127.0.0.1:{server.grpc_port}", retry=None) as client,
    ):
        client.wait_ready(timeout=60)
        client.generate("Hi", max_tokens=4)
        asyncio.run(story(server, client))
