"""Tests that no body within the limits stalls the event loop or holds the GIL."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json

import grpc
import pytest

from tests.serve import evil
from tests.serve.evil import GRPC, HTTP
from tests.serve.holds import measuring
from tests.serve.live import Live, live_fake
from tests.serve.processes import fake_server
from tests.yardstick import slowness

SIZE, WHOLE = 1 << 19, (16 << 20) - 1000
# Seconds of CPU time on the yardstick's machine. Bounded work takes milliseconds, unbounded work seconds.
MOST, MOST_OF_WORK = 0.15, 0.5
# On a busy machine the loop may get no CPU time while another thread computes without the GIL; retries cover that.
TRIES = 5
SECONDS = 240
ANSWERS = {200, 400, 413}
CODES = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


# One of each kind: many JSON values, many gRPC messages, a text.
NAMED = [each for each in (*HTTP, *GRPC) if each.name in ("messages of numbers", "empty messages", "a long text")]
FEW_MIB = 48


@dataclasses.dataclass(frozen=True)
class Target:
    """Addresses of a server."""

    http_port: int
    target: str


def target_of(live: Live) -> Target:
    return Target(live.server.http_port or 0, live.target)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with live_fake(tmp_path_factory.mktemp("model")) as found:
        send(target_of(found), evil.CHAT, b'{"messages":[{"role":"u","content":"hi"}],"max_tokens":1}')
        yield found


def _named(attack: evil.Attack) -> str:
    return f"{attack.door} {attack.name}"


@pytest.mark.parametrize("attack", [*HTTP, *GRPC][::3], ids=_named)
def test_a_body_holds_nobody(server, attack):
    check_hold(server, attack, SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("size", [SIZE, WHOLE], ids=["part", "whole"])
@pytest.mark.parametrize("attack", [*HTTP, *GRPC], ids=_named)
def test_no_body_holds_anybody(server, attack, size):
    check_hold(server, attack, size)


def check_hold(server, attack, size):
    body, most = attack.make(size), MOST_OF_WORK if attack.is_work else MOST
    for _ in range(TRIES):
        with measuring(server) as holds:
            answer = send(target_of(server), attack.door, body)
        print(f"{holds.loop * 1e3:.0f} ms of the loop, {holds.process * 1e3:.0f} ms of the process: {answer}")
        if holds.process < most * slowness():
            return
    pytest.fail(f"held for {holds.process:.3f} s of processor time")


@pytest.mark.parametrize("attacks", [NAMED, pytest.param([*HTTP, *GRPC], marks=pytest.mark.slow)], ids=["named", "all"])
def test_a_body_is_held_in_little_memory(tmp_path, attacks):
    """The API server process grows by at most eight times the size of a body, plus a constant."""
    with fake_server(tmp_path) as server:
        target = Target(server.http_port, f"127.0.0.1:{server.grpc_port}")
        for attack in NAMED:  # threads and processes started for the first body stay
            send(target, attack.door, attack.make(SIZE))
        for attack in attacks:
            body = attack.make(WHOLE)
            before = server.resident_mib(anew=True)
            answer = send(target, attack.door, body)
            grown, size = server.most_resident_mib() - before, len(body) / 2**20
            print(f"{attack.name}: {grown:.0f} MiB for {size:.1f}: {answer[:80]}")
            assert grown < 8 * size + FEW_MIB, attack.name


def send(server: Target, door: str, body: bytes) -> str:
    """Return the beginning of the response, which must be valid."""
    return _post(server, door, body) if door.startswith("/") else _call(server, door, body)


def _post(server: Target, path: str, body: bytes) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=SECONDS)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        told = answer.read()
    finally:
        connection.close()
    assert answer.status in ANSWERS, told[:500]
    if answer.status != 200:
        assert json.loads(told)["error"]["message"]
    return f"{answer.status} {told[:200].decode(errors='replace')}"


def _call(server: Target, path: str, body: bytes) -> str:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.target, options) as channel:
        calls = {True: channel.stream_stream, False: channel.unary_stream}
        streams = path == evil.BATCH
        call = calls[streams](f"/{path}")(iter([body]) if streams else body, timeout=SECONDS)
        answers = []
        with contextlib.suppress(grpc.RpcError):
            answers.extend(call)
        assert call.code() in CODES, call
        return f"{call.code().name} {call.details()[:200]} {b''.join(answers)[:100]!r}"


def test_the_measure_sees_what_holds(server):
    """The measurement detects a loop that computes, and a thread that holds the GIL."""
    busy = "[" + "1," * 1_000_000 + "1]"
    for hold in (_in_loop, _in_thread):
        with measuring(server) as holds:
            asyncio.run_coroutine_threadsafe(hold(busy), server.loop).result(60)
        assert holds.process > 0.02


async def _in_loop(text: str) -> None:
    json.loads(text)


async def _in_thread(text: str) -> None:
    await asyncio.to_thread(json.loads, text)
