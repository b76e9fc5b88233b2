"""Tests of KV events of a whole server: the subscribers' view of its cache while it works, idles and is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import zmq
import zmq.asyncio
from smg_grpc_proto import vllm_engine_pb2_grpc

from jaxinfer.serve.grpc.vllm.messages import common
from tests.serve.kv_events.subscribers import DECODERS, Router
from tests.serve.processes import BOUND, ServerProcess, fake_server

PAGE = 16  # tokens, which are bytes
ON = {"kv_events": True, "vllm_grpc": True, "kv_events_endpoint": "tcp://127.0.0.1:0"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    replay = {"kv_events_replay_endpoint": "tcp://127.0.0.1:0"}
    with fake_server(tmp_path_factory.mktemp("kv"), "--context", "512", **ON, **replay) as running:
        yield running


async def complete(server: ServerProcess, prompt: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=BOUND) as client:
        answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
        assert answer.status_code == 200, answer.text


async def reset(server: ServerProcess) -> int:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=BOUND) as client:
        return (await client.post("/reset_prefix_cache")).json()["pages"]


class Heard:
    """A gRPC subscription and the state received."""

    def __init__(self, call: Any) -> None:
        self.router, self.loads, self.chunks = Router(), list[Any](), 0
        self._call = call

    async def until(self, condition) -> None:
        """Read messages until the condition holds for the router; it may hold at once."""
        async with asyncio.timeout(BOUND):
            while not condition(self.router):
                message = await self._call.read()
                assert message is not grpc.aio.EOF
                if message.HasField("load"):
                    self.loads.append(message.load)
                self.chunks += message.HasField("snapshot")
                assert self.router.take_message(message)


@contextlib.asynccontextmanager
async def subscribed(server: ServerProcess, number: int = 0) -> AsyncIterator[Heard]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        request = common.SubscribeKvEventsRequest(start_sequence_number=number, load_records_before_first_batch=True)
        call = stub.SubscribeKvEvents(request)
        yield Heard(call)
        call.cancel()


def pages(router: Router) -> set[str]:
    """Return the texts of the known pages."""
    return {bytes(token - 3 for token in tokens).decode() for _, tokens, _ in router.known.values()}


async def clients(server: ServerProcess, most: int) -> AsyncIterator[httpx.AsyncClient]:
    """Yield the same client ``most`` times: creating one takes longer than the measured times."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=BOUND) as client:
        for _ in range(most):
            yield client


async def cleared_after(heard: Heard, client: httpx.AsyncClient) -> float:
    """Return the seconds from a cache reset of an idle engine to its event."""
    await client.post("/v1/completions", json={"prompt": "d" * PAGE + "e", "max_tokens": 1})
    await heard.until(lambda router: "d" * PAGE in pages(router))
    begin = time.monotonic()
    await client.post("/reset_prefix_cache")
    await heard.until(lambda router: not router.known)
    return time.monotonic() - begin


def test_pages_are_told_of_as_they_come_and_after_a_reset_at_once(server):
    async def test():
        await reset(server)
        async with subscribed(server) as heard:
            await complete(server, "a" * PAGE + "b" * PAGE + "c")
            await heard.until(lambda router: pages(router) == {"a" * PAGE, "b" * PAGE})
            first, second = sorted(heard.router.known.values(), key=lambda block: block[0] is not None)
            assert (first[0], first[2], second[2]) == (None, {"GPU"}, {"GPU"})
            waits = [await cleared_after(heard, client) async for client in clients(server, 30)]
            assert min(waits) < 0.1, "an engine that rests tells at once"

    asyncio.run(test())


def test_who_comes_later_is_told_what_is_there_and_who_comes_back_what_is_new(server):
    async def test():
        await complete(server, "x" * PAGE + "y")
        async with subscribed(server) as heard:
            await heard.until(lambda router: "x" * PAGE in pages(router))
            assert heard.chunks == 1
            cursor, known = heard.router.cursor, heard.router.known
        await complete(server, "z" * PAGE + "y")
        async with subscribed(server, cursor) as again:
            again.router.known, again.router.cursor = known, cursor
            await again.until(lambda router: "z" * PAGE in pages(router))
            assert again.chunks == 0

    asyncio.run(test())


def test_loads_come_with_batches_and_while_nothing_changes(server):
    async def test():
        async with subscribed(server) as heard:
            await heard.until(lambda router: router.cursor)
            number = heard.router.cursor
            await heard.until(lambda router: len(heard.loads) > 2)
            alone = [load for load in heard.loads if load.load_only]
            assert alone
            assert alone[-1].running_requests == alone[-1].waiting_requests == 0
            assert alone[-1].max_total_num_tokens == 16384 * PAGE
            assert heard.router.cursor == number
            samples = [load.sample for load in heard.loads]
            assert samples == sorted(set(samples))

    asyncio.run(test())


def test_who_has_heard_everything_gets_a_load_and_its_own_number(server):
    async def test():
        async with subscribed(server) as heard:
            await heard.until(lambda router: router.cursor)
            cursor = heard.router.cursor
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            call = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=cursor + 1))
            message = await asyncio.wait_for(call.read(), BOUND)
            assert (message.sequence_number, message.load.load_only, len(message.events)) == (cursor, True, 0)

    asyncio.run(test())


def test_zmq_tells_the_same(server):
    async def test():
        log = server.log()
        found = re.search(r"KV events are told at (\S+), what was missed at (\S+)", log)
        assert found is not None, log
        await complete(server, "q" * PAGE + "r")
        async with subscribed(server) as heard:
            await heard.until(lambda router: "q" * PAGE in pages(router))
            context = zmq.asyncio.Context()
            asking = context.socket(zmq.DEALER)
            asking.connect(found[2])
            await asking.send_multipart([b"", bytes(8)])
            router, topics = Router(), set()
            while True:
                _, topic, number, payload = await asyncio.wait_for(asking.recv_multipart(), BOUND)
                if int.from_bytes(number, signed=True) < 0:
                    break
                topics.add(topic.decode())
                assert router.take_events(int.from_bytes(number), DECODERS["map"].decode(payload).events)
            context.destroy(linger=0)
            assert len(topics) == 1
            assert re.fullmatch(r"kv@[^@]+@fake", topics.pop())
            assert router.known == heard.router.known

    asyncio.run(test())


def test_an_engine_that_is_killed_is_recognised_and_so_is_the_next_one(tmp_path: pathlib.Path):
    async def test(server: ServerProcess):
        await complete(server, "m" * PAGE + "n")
        async with subscribed(server) as heard:
            await heard.until(lambda router: len(router.known) == 1)
            core = server.core
            assert core is not None
            os.kill(core, signal.SIGKILL)
            await heard.until(lambda router: not router.known)
            before = heard.router.cursor
            await heard.until(lambda router: router.cursor > before)
            await complete(server, "o" * PAGE + "p")
            await heard.until(lambda router: pages(router) == {"o" * PAGE})

    with fake_server(tmp_path, **ON) as server:
        asyncio.run(test(server))


def test_without_kv_events_there_are_none(tmp_path: pathlib.Path):
    async def test(server: ServerProcess):
        async with subscribed(server) as heard:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await heard.until(lambda router: router.known)
            assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED

    with fake_server(tmp_path, vllm_grpc=True) as server:
        asyncio.run(test(server))
