"""Tests of clients that are slow, flood the server, reset connections or disappear."""

import asyncio
import contextlib
import json
import random
import re
import socket
import time

import pytest

from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.server import HttpServer
from jaxinfer.serve.runtime.descriptors import SPARE
from jaxinfer.serve.settings import ServeConfig
from tests.serve.fake_engine import Mischief
from tests.serve.http.support import BOUND, post, raw, run, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def status_of(answer):
    """Return the status of the first response; the data may begin with the rest of an earlier one."""
    return int(answer[answer.index(b"HTTP/1.1 ") :].split()[1])


async def closed(reader):
    """Return the data received until the server closes."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), BOUND)
    return b""


def cut_by(running, reason):
    return running.door.metrics.http_cut.labels(reason)._value.get()


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", b"POST /v1/comp", HEAD, HEAD + b"X-A: " + b"b" * 100])
def test_a_head_that_does_not_come(sent):
    async def test():
        async with serving(header_seconds=0.2) as running:
            reader, writer = await running.connect()
            writer.write(sent)
            answer = await closed(reader)
            assert status_of(answer) == 408
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
            assert cut_by(running, "head") == 1
            writer.close()

    run(test)


def test_a_head_that_comes_byte_by_byte_has_no_more_time():
    async def test():
        async with serving(header_seconds=0.3) as running:
            reader, writer = await running.connect()
            ended = asyncio.ensure_future(closed(reader))
            start = time.monotonic()
            while not ended.done():
                writer.write(b"P" if time.monotonic() == start else b"O")
                await asyncio.wait((ended,), timeout=0.02)
            assert status_of(ended.result()) in (400, 408)
            writer.close()

    run(test)


@pytest.mark.parametrize("framing", [b"Content-Length: 100\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n5\r\n"])
def test_a_body_that_does_not_come(framing):
    async def test():
        async with serving(header_seconds=0.2) as running:
            reader, writer = await running.connect()
            writer.write(HEAD + framing + b'{"p"')
            assert await closed(reader) == b""
            assert cut_by(running, "body") == 1
            writer.close()

    run(test)


def test_blank_lines_keep_no_connection_open():
    async def test():
        async with serving(header_seconds=0.3) as running:
            reader, writer = await running.connect()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            ended = asyncio.ensure_future(closed(reader))
            while not ended.done():
                writer.write(b"\r\n")
                await asyncio.wait((ended,), timeout=0.02)
            assert status_of(ended.result()) == 408
            writer.close()

    run(test)


@pytest.mark.parametrize("header", [b"X-A: " + b"a" * 2**20, b"\r\n".join(b"X-%d: a" % i for i in range(20_000))])
def test_a_head_of_a_megabyte(header):
    async def test():
        async with serving() as running:
            assert status_of(await raw(running, HEAD + header + b"\r\n\r\n")) == 431
            endless = await raw(running, b"GET /" + b"a" * 2**20)
            assert status_of(endless) == 431
            async with running.http() as client:
                assert (await client.get("/health")).status_code == 200

    run(test)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_refused_before_it_is_read(declared):
    async def test():
        async with serving(limits=ServeLimits(message_bytes=100_000)) as running:
            reader, writer = await running.connect()
            if declared:
                writer.write(HEAD + b"Content-Length: 1000000000\r\n\r\n")
            else:
                writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
                for _ in range(11):
                    writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), BOUND)
            assert status_of(head) == 413
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():  # the server discards further data, up to a limit
                    writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0)
            assert cut_by(running, "body") == 1
            writer.close()

    run(test)


EARLY = [
    (HEAD + b"Content-Length: 3000000\r\n\r\n", 413),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2DC6C0\r\n", 413),
    (HEAD.replace(b"json", b"xml") + b"Content-Length: 3000000\r\n\r\n", 400),
    (HEAD.replace(b"completions", b"nothing") + b"Content-Length: 3000000\r\n\r\n", 404),
    (HEAD.replace(b"POST", b"PUT") + b"Content-Length: 3000000\r\n\r\n", 405),
    (HEAD.replace(b"POST /v1/completions", b"GET /health") + b"Content-Length: 3000000\r\n\r\n", 200),
    (HEAD + b"Connection: close\r\nContent-Length: 3000000\r\n\r\n", 413),
    (HEAD + b"Expect: 100-continue\r\nContent-Length: 3000000\r\n\r\n", 413),
    (HEAD + b"X-A: ", 431),
    (b"PO\0ST ", 400),
]


@pytest.mark.parametrize(("head", "status"), EARLY)
def test_whoever_still_sends_can_read_the_refusal(head, status):
    """A client that is still sending can read the error and sees ``Connection: close``: the framing would be lost."""

    async def test():
        async with serving(limits=ServeLimits(message_bytes=1_000_000)) as running:
            reader, writer = await running.connect()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # a keep-alive connection
            assert b"close" not in await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            for _ in range(30):
                writer.write(b"x" * 100_000)
                await writer.drain()
                await asyncio.sleep(0)
            answer = await asyncio.wait_for(reader.read(), BOUND)
            assert status_of(answer) == status
            lines, _, body = answer.lower().partition(b"\r\n\r\n")
            assert b"connection: close" in lines.split(b"\r\n")
            assert b"content-length: %d" % len(body) in lines.split(b"\r\n")
            assert status == 200 or json.loads(body)["error"]["message"]
            writer.close()
            await _empty(running)
            assert cut_by(running, "body") == 0

    run(test)


def test_a_wrong_key_on_a_kept_connection(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(key_entry(new_key(), "me", ["infer"]))

    async def test():
        async with serving(keys=path) as running:
            reader, writer = await running.connect()
            writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}" + HEAD + b"Content-Length: 3000000\r\n\r\n")
            first, second = [await reader.readuntil(b"\r\n\r\n") + await reader.readuntil(b"}}") for _ in "ab"]
            assert (status_of(first), status_of(second)) == (401, 401)
            assert (b"close" in first, b"connection: close" in second) == (False, True)
            assert await closed(reader) == b""
            writer.close()

    run(test)


def test_what_follows_an_early_answer_is_no_request():
    async def test():
        go = asyncio.Event()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await go.wait()
            await send({"type": "http.response.body", "body": b"ok"})

        server = HttpServer(ServeConfig(model="fake", http_port=0), AppState("1"), app)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD + b"Content-Length: 5\r\n\r\n")
        assert b"connection: close" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"12345" + HEAD + b"Content-Length: 0\r\n\r\n")
        (connection,) = server._server.server_state.connections
        while not connection.pipeline:
            await asyncio.sleep(0.005)
        go.set()
        assert await closed(reader) == b"ok"
        writer.close()
        await server.stop()

    run(test)


def test_what_is_no_http():
    async def test():
        async with serving() as running:
            answer = await raw(running, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
            assert status_of(answer) == 400
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_go_at_any_time_leave_nothing_behind(stream):
    async def test():
        async with serving(Mischief(seconds=0.001)) as running:
            body = json.dumps({"prompt": ["Hi", "Ho"], "max_tokens": 1000, "stream": stream, "n": 2}).encode()
            chance = random.Random(7)

            async def visit():
                reader, writer = await running.connect()
                writer.write(post("/v1/completions", body))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(chance.randrange(1, 3000)), chance.random() * 0.2)
                if chance.random() < 0.5:
                    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # close with a reset
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()

            await asyncio.gather(*(visit() for _ in range(40)))
            await running.quiet()
            await _empty(running)

    run(test)


async def _empty(running):
    state = running.server._server.server_state
    while state.connections or state.tasks:
        await asyncio.sleep(0.005)


def test_a_client_that_reads_nothing_is_cut_and_disturbs_no_one():
    async def test():
        async with serving(slow_reader_seconds=0.5) as running:
            (listener,) = running.server._server.servers[0].sockets
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # else the kernel buffers megabytes
            # Logprobs enlarge the output: a slow machine merges tokens, which would then fit into the buffers.
            asked = {"prompt": "Hi", "max_tokens": 1500, "n": 4, "stream": True, "logprobs": 5}
            lazy = socket.socket()
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.setblocking(False)
            await asyncio.get_running_loop().sock_connect(lazy, ("127.0.0.1", running.server.port))
            await asyncio.get_running_loop().sock_sendall(lazy, post("/v1/completions", json.dumps(asked).encode()))
            async with running.http() as client:
                while cut_by(running, "reader") == 0:
                    answer = await client.post("/v1/completions", json={"prompt": "Ho", "max_tokens": 5})
                    assert answer.status_code == 200
            await running.quiet()
            lazy.close()

    run(test)


def test_a_slow_reader_gets_all_of_it():
    async def test():
        async with serving(slow_reader_seconds=0.4) as running:
            asked = {"prompt": "Hi", "max_tokens": 1500, "n": 4, "stream": True, "return_token_ids": True, "seed": 1}
            reader, writer = await running.connect()
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            writer.write(post("/v1/completions", json.dumps(asked).encode()))
            got = bytearray()
            while data := await asyncio.wait_for(reader.read(100_000), BOUND):
                got += data
                await asyncio.sleep(0.005)
            assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert got.count(b'"finish_reason": "length"') == 4
            assert cut_by(running, "reader") == 0
            writer.close()

    run(test)


def test_what_is_written_is_sent_at_once():
    async def test():
        async with serving() as running:
            _, writer = await running.connect()
            while not running.server._server.server_state.connections:
                await asyncio.sleep(0.005)
            (connection,) = running.server._server.server_state.connections
            its = connection.transport.get_extra_info("socket")
            assert its.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()

    run(test)


GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
LONG = {"prompt": "Hi", "max_tokens": 2000, "stream": True}


async def asked(running, path):
    """Return a connection on which one request was answered."""
    reader, writer = await running.connect()
    writer.write(GET % path)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), BOUND)
    assert status_of(head) == 200
    if size := re.search(rb"content-length: (\d+)", head):
        await reader.readexactly(int(size[1]))
    return reader, writer


async def accepted(running, count):
    while len(running.server._server.server_state.connections) < count:
        await asyncio.sleep(0.005)


async def streaming(running):
    """Return a connection with a streaming response in progress."""
    reader, writer = await running.connect()
    writer.write(post("/v1/completions", json.dumps(LONG).encode()))
    await asyncio.wait_for(reader.readuntil(b"data: "), BOUND)
    return reader, writer


def test_more_connections_than_are_allowed():
    async def test():
        async with serving(Mischief(seconds=0.005), max_connections=2) as running:
            held = [await streaming(running) for _ in range(2)]
            refused = await raw(running, GET % b"/v1/models")
            assert status_of(refused) == 503
            assert b"retry-after: 1" in refused
            assert b"connection: close" in refused
            for path in (b"/health", b"/ready"):
                assert (
                    status_of(await raw(running, b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path))
                    == 200
                )
            for _, writer in held:
                writer.close()

    run(test)


def test_probes_that_stay_do_not_keep_others_out(tmp_path):
    """Keep-alive connections that only request health checks and fill all slots do not keep other clients out."""
    path, key = tmp_path / "keys.yaml", new_key()
    path.write_text(key_entry(key, "me", ["infer"]))
    most, crowd = 8, 8 + SPARE

    async def test():
        async with serving(keys=path, max_connections=most) as running:
            probes = [await asked(running, b"/health") for _ in range(crowd)]
            async with running.http(headers={"authorization": f"Bearer {key}"}) as client:
                for _ in range(3):
                    answer = await client.post("/v1/completions", json={"prompt": "Ho", "max_tokens": 5})
                    assert answer.status_code == 200
                    probes += [await asked(running, b"/health") for _ in range(crowd)]
                await asked(running, b"/ready")
            assert len(running.server._server.server_state.connections) <= crowd
            assert cut_by(running, "connections") >= 3 * crowd
            for _, writer in probes:
                writer.close()

    run(test)


def test_who_is_idle_longest_gives_way_and_strangers_first():
    async def test():
        async with serving(Mischief(seconds=0.005), max_connections=4) as running:
            busy = await streaming(running)
            known = await asked(running, b"/v1/models")
            silent = await running.connect()
            await accepted(running, 3)
            probe = await asked(running, b"/health")
            for preemption_victim in (silent, probe):
                comes = await asked(running, b"/v1/models")
                assert await closed(preemption_victim[0]) == b""
                assert not known[0].at_eof()
            await asked(running, b"/v1/models")
            assert await closed(known[0]) == b""
            assert not comes[0].at_eof()
            assert await busy[0].readuntil(b"data: ")
            assert cut_by(running, "connections") == 3
            busy[1].close()

    run(test)


def test_a_door_where_all_are_busy_answers_the_last_who_come():
    """If all connections are busy, new clients get an error; the oldest are cut, so that probes get an answer."""

    async def test():
        async with serving(Mischief(seconds=0.005), max_connections=1) as running:
            busy = await streaming(running)
            crowd = [await running.connect() for _ in range(2 * SPARE)]
            await closed(crowd[SPARE - 1][0])
            assert status_of(await raw(running, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")) == 200
            for _, writer in (busy, *crowd):
                writer.close()

    run(test)


def test_a_stop_ends_what_runs_and_frees_the_port():
    async def test():
        async with serving(Mischief(seconds=0.005)) as running:
            reader, writer = await running.connect()
            writer.write(post("/v1/completions", b'{"prompt": "Hi", "max_tokens": 2000, "stream": true}'))
            await reader.readuntil(b"data: ")
            await running.server.stop()
            assert not (await closed(reader)).endswith(b"0\r\n\r\n")  # visibly truncated
            with pytest.raises(OSError, match="Connect"):
                await running.connect()
            await running.quiet()
            writer.close()

    run(test)
