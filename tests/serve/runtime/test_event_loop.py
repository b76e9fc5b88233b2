"""Tests of the event loop of a server process."""

import asyncio
import functools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, override

import grpc

from jaxinfer.serve.runtime.event_loop import Holds, Loop

PROCESS = """
import asyncio, sys
from jaxinfer.serve.runtime import event_loop

async def main():
    assert type(asyncio.get_running_loop()) is event_loop.Loop
    return sys.getswitchinterval()  # how long a thread that computes may keep the loop waiting

seconds = event_loop.run(main())
assert seconds < 0.001, seconds
"""


class PollerCompletionQueue:
    """A completion queue like grpc.aio's: a byte per event; a wake-up reads one byte and then all events."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.events: list[int] = []
        self.taken: list[int] = []
        self.wakes = 0

    def put(self, event: int) -> None:
        self.events.append(event)
        self.writer.send(b"1")

    def _handle_events(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self.reader.recv(1) == b"1"
        self.wakes += 1
        self.taken += self.events
        self.events.clear()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(self.reader, functools.partial(self._handle_events, loop))


def test_many_events_wake_it_once() -> None:
    async def scenario() -> None:
        queue = PollerCompletionQueue()
        queue.watch(asyncio.get_running_loop())
        for event in range(100):
            queue.put(event)
        await passes()
        assert queue.taken == list(range(100))
        assert queue.wakes == 1
        for event in range(100, 110):  # single events still cost one wake-up each
            queue.put(event)
            await passes()
        assert queue.taken == list(range(110))
        assert queue.wakes == 11

    asyncio.run(scenario(), loop_factory=Loop)


def test_others_are_not_touched() -> None:
    async def scenario() -> None:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        got: list[bytes] = []
        asyncio.get_running_loop().add_reader(reader, lambda: got.append(reader.recv(2)))
        writer.send(b"123")
        await passes()
        assert got == [b"12", b"3"]

    asyncio.run(scenario(), loop_factory=Loop)


def test_it_knows_how_long_it_was_held() -> None:
    """The loop measures stalls by its own callbacks, and by a thread that holds the GIL."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        time.sleep(0.1)
        await asyncio.sleep(0)
        assert loop.holds.longest() >= 0.1
        assert loop.holds.long >= 1
        loop.holds = loop._selector._holds = Holds()
        begun = time.monotonic()
        await asyncio.to_thread(json.loads, "[" + "1," * 6_000_000 + "1]")
        took = time.monotonic() - begun
        assert loop.holds.longest() >= took / 2

    asyncio.run(scenario(), loop_factory=Loop)


def test_a_hold_is_forgotten_after_two_minutes_at_most() -> None:
    holds = Holds()
    holds.add(0.5, 100.0)
    holds.add(0.1, 101.0)
    assert (holds.longest(), holds.long) == (0.5, 2)
    holds.add(0.01, 170.0)
    assert holds.longest() == 0.5  # from the previous minute
    holds.add(0.02, 240.0)
    assert (holds.longest(), holds.long) == (0.02, 2)
    holds.add(0.03, 1000.0)
    assert holds.longest() == 0.03


class Watched(Loop):
    woken = 0

    @override
    def _woken(self, wakes: socket.socket, handle: Callable[[], Any]) -> None:
        self.woken += 1
        super()._woken(wakes, handle)


def test_grpc_is_recognised() -> None:
    """Concurrent calls are answered, and the loop recognises the reader of this version of grpc.aio."""

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def scenario() -> None:
        server = grpc.aio.server()
        handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/test.Test/Echo")
            async with asyncio.timeout(30):
                answers = await asyncio.gather(*(call(str(i).encode()) for i in range(100)))
        await server.stop(None)
        assert answers == [str(i).encode() for i in range(100)]
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Watched)
        assert loop.woken > 0

    asyncio.run(scenario(), loop_factory=Watched)


def test_a_process_that_serves_runs_on_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


async def passes() -> None:
    """Run more than enough iterations of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)
