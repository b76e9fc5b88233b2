"""Tests of requests whose start, end or content a proxy and this server might interpret differently."""

import asyncio
import contextlib
import errno
import json
import os

import pytest

from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.server import HttpServer
from jaxinfer.serve.settings import ServeConfig
from tests.serve.fake_engine import Mischief
from tests.serve.http.support import BOUND, post, raw, run, serving

NEXT = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = b"POST /body HTTP/1.1\r\nHost: x\r\n"
CHUNKED = BODY + b"Transfer-Encoding: chunked\r\n\r\n"


def get(*lines, version=b"HTTP/1.1", target=b"/first", host=b"Host: x"):
    return b"\r\n".join([b"GET " + target + b" " + version, *([host] if host else []), *lines, b"", b""])


REFUSED = {
    "HTTP/0.9": (b"GET /first\r\n\r\n", 505),
    "a head in HTTP/0.9": (get(version=b"HTTP/0.9"), 505),
    "HTTP/1.2": (get(version=b"HTTP/1.2"), 505),
    "HTTP/2.0": (get(version=b"HTTP/2.0"), 505),
    "HTTP/3.0": (get(version=b"HTTP/3.0"), 505),
    "no version": (get(version=b"HTTP/"), 400),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "no host": (get(host=None), 400),
    "two hosts": (get(b"Host: y"), 400),
    "the same host twice": (get(b"Host: x"), 400),
    "two hosts in HTTP/1.0": (get(b"Host: y", version=b"HTTP/1.0"), 400),
    "a list of hosts": (get(host=b"Host: a, b"), 400),
    "a host with a path": (get(host=b"Host: a/b"), 400),
    "a host with a user": (get(host=b"Host: a@b"), 400),
    "a host with a wrong port": (get(host=b"Host: a:b"), 400),
    "a target without a slash": (get(target=b"first"), 400),
    "a target with a fragment": (get(target=b"/first#part"), 400),
    "another scheme": (get(target=b"ftp://x/first"), 400),
    "a target without an authority": (get(target=b"http:///first"), 400),
    "NUL in a target": (get(target=b"/fi\0rst"), 400),
    "no ASCII in a target": (get(target=b"/fi\xffrst"), 400),
    "CONNECT": (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    "length and encoding": (BODY + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "encoding and length": (BODY + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (BODY + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
    "the same length twice": (BODY + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    "a list of lengths": (BODY + b"Content-Length: 3, 3\r\n\r\nabc", 400),
    "a length with a sign": (BODY + b"Content-Length: +3\r\n\r\nabc", 400),
    "a length in hexadecimal": (BODY + b"Content-Length: 0x3\r\n\r\nabc", 400),
    "an empty length": (BODY + b"Content-Length: \r\n\r\nabc", 400),
    "a length beyond 64 bits": (BODY + b"Content-Length: 99999999999999999999999\r\n\r\nabc", 400),
    "an encoding that is not the last": (BODY + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
    "no chunks": (BODY + b"Transfer-Encoding: identity\r\n\r\nabc", 400),
    "an encoding that looks like it": (BODY + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "an encoding behind a comma": (BODY + b"Transfer-Encoding: , chunked\r\n\r\n0\r\n\r\n", 501),
    "chunks of gzip": (BODY + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "two encodings": (BODY + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    "chunks twice": (BODY + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", 400),
    "a folded header": (get(b"X-A: a", b" b"), 400),
    "a space before the first header": (get(host=b" Host: x"), 400),
    "a line feed alone": (get().replace(b"\r\n", b"\n"), 400),
    "a line feed alone in the head": (get(b"X-A: a\nX-B: b"), 400),
    "a carriage return alone": (get(b"X-A: a\rX-B: b"), 400),
    "a space behind a name": (get(b"X-A : a"), 400),
    "a space in a name": (get(b"X A: a"), 400),
    "no name": (get(b": a"), 400),
    "no colon": (get(b"X-A"), 400),
    "NUL in a name": (get(b"X-\0A: a"), 400),
    "NUL in a value": (get(b"X-A: a\0b"), 400),
    "a control character in a value": (get(b"X-A: a\x01b"), 400),
    "a method of nobody": (b"FETCH /first HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a method in small letters": (b"get /first HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "another expectation": (get(b"Expect: a miracle"), 417),
}

BROKEN = {
    "a chunk of more than its size": b"1\r\nxy\r\n0\r\n\r\n",
    "a negative chunk": b"-1\r\nx\r\n0\r\n\r\n",
    "a chunk in C's hexadecimal": b"0x1\r\nx\r\n0\r\n\r\n",
    "a space behind a size": b"1 \r\nx\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": b"fffffffffffffffff\r\nx\r\n0\r\n\r\n",
    "chunks with line feeds alone": b"1\nx\n0\n\n",
    "an extension with a line feed alone": b"1;a\nx\r\n0\r\n\r\n",
    "a length in a trailer": b"1\r\nx\r\n0\r\nContent-Length: 3\r\n\r\n",
    "a folded trailer": b"1\r\nx\r\n0\r\nX-A: a\r\n b\r\n\r\n",
    "no chunk": b"\r\n\r\n",
}

SERVED = {
    "HTTP/1.0 without a host": (get(version=b"HTTP/1.0", host=None), [("GET", "/first", b"")]),
    "an empty host": (get(host=b"Host:"), [("GET", "/first", b"")]),
    "hosts with ports": (get(host=b"Host: [::1]:80"), [("GET", "/first", b"")]),
    "an absolute target": (get(target=b"http://y:1/first"), [("GET", "/first", b"")]),
    "blank lines before a request": (b"\r\n\r\n" + get(), [("GET", "/first", b"")]),
    "space around a length": (BODY + b"Content-Length:\t3\t\r\n\r\nabc", [("POST", "/body", b"abc")]),
    "chunks with extensions": (CHUNKED + b'1;a=b\r\nx\r\n1;c="d"\r\ny\r\n0;e\r\n\r\n', [("POST", "/body", b"xy")]),
    "CHUNKED": (
        BODY + b"Transfer-Encoding: CHUNKED\r\n\r\n1\r\nx\r\n0\r\n\r\n" + NEXT,
        [("POST", "/body", b"x"), ("GET", "/next", b"")],
    ),
    "a trailer": (
        CHUNKED + b"1\r\nx\r\n0\r\nX-A: a\r\n\r\n" + NEXT,
        [("POST", "/body", b"x"), ("GET", "/next", b"")],
    ),
    "an expectation": (BODY + b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\nx", [("POST", "/body", b"x")]),
    "an upgrade": (
        get(b"Connection: upgrade", b"Upgrade: websocket") + NEXT,
        [("GET", "/first", b""), ("GET", "/next", b"")],
    ),
    "upgrades of requests with bodies": (
        2
        * (
            BODY
            + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(NEXT)
            + NEXT
        )
        + CHUNKED.replace(b"Host: x", b"Host: x\r\nUpgrade: h2c\r\nConnection: upgrade")
        + b"1\r\nx\r\n0\r\n\r\n"
        + NEXT,
        [("POST", "/body", NEXT), ("POST", "/body", NEXT), ("POST", "/body", b"x"), ("GET", "/next", b"")],
    ),
}


@contextlib.asynccontextmanager
async def echoing(**settings):
    """Yield a server that answers "ok" to each complete request, and the requests: method, path, body, headers."""
    seen = []

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        seen.append((scope["method"], scope["path"], body, list(scope["headers"])))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    server = HttpServer(ServeConfig(model="fake", http_port=0, **settings), AppState("1"), app)
    await server.start()
    try:
        yield server, seen
    finally:
        await server.stop()


async def sent(server, data, *, split=False):
    """Return the data received until the server closes or stops responding."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for part in [data[at : at + 1] for at in range(len(data))] if split else [data]:
        writer.write(part)
        await asyncio.sleep(0)
    answer = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while more := await asyncio.wait_for(reader.read(1 << 16), 0.3 if answer else BOUND):
            answer += more
    writer.close()
    return answer


def statuses(answer):
    return [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith((b"HTTP/1.1 ", b"okHTTP/1.1 "))]


def assert_refused(name, answer, status):
    assert statuses(answer) == [status], (name, answer)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower(), name
    assert json.loads(body)["error"]["message"], name


@pytest.mark.parametrize("split", [False, True])
def test_heads_that_are_refused(split):
    async def test():
        async with echoing() as (server, seen):
            for name, (request, status) in REFUSED.items():
                answer = await sent(server, request + NEXT, split=split)
                assert_refused(name, answer, status)
                assert not seen, name

    run(test)


@pytest.mark.parametrize("split", [False, True])
def test_malformed_chunks_are_told_so(split):
    async def test():
        async with echoing() as (server, seen):
            for name, chunks in BROKEN.items():
                answer = await sent(server, CHUNKED + chunks + NEXT, split=split)
                assert_refused(name, answer, 400)
                assert not seen, name

    run(test)


def test_malformed_chunks_are_told_so_by_the_door():
    async def test():
        async with serving() as running:
            head = post("/v1/completions", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            assert_refused("door", await raw(running, head + b'2\r\n{"\r\nzz\r\n'), 400)
            assert running.frontend.active == 0

    run(test)


@pytest.mark.parametrize("split", [False, True])
def test_what_is_served(split):
    async def test():
        async with echoing() as (server, seen):
            for name, (request, expected) in SERVED.items():
                answer = await sent(server, request, split=split)
                assert [each[:3] for each in seen] == expected, (name, answer)
                assert [status for status in statuses(answer) if status != 100] == [200] * len(expected), name
                seen.clear()

    run(test)


def test_nothing_is_read_behind_an_end():
    async def test():
        async with echoing() as (server, seen):
            assert statuses(await sent(server, get(b"Connection: close") + NEXT)) == [200]
            assert len(seen) == 1

    run(test)


@pytest.mark.parametrize("split", [False, True])
def test_a_trailer_is_no_header(split):
    async def test():
        async with echoing() as (server, seen):
            await sent(
                server, CHUNKED + b"1\r\nx\r\n0\r\nAuthorization: Bearer k\r\nX-Request-Id: me\r\n\r\n", split=split
            )
            ((_, _, body, headers),) = seen
            assert (body, headers) == (b"x", [(b"host", b"x"), (b"transfer-encoding", b"chunked")])

    run(test)


@pytest.mark.parametrize("split", [False, True])
def test_a_key_in_a_trailer_opens_nothing(tmp_path, split):
    key, path = new_key(), tmp_path / "keys.yaml"
    path.write_text(key_entry(key, "me", ["infer"]))

    async def test():
        async with serving(keys=path) as running:
            asked = b'{"prompt": "Hi", "max_tokens": 1}'
            head = post("/v1/completions", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            trailer = b"0\r\nAuthorization: Bearer %s\r\n\r\n" % key.encode()
            answer = await sent(running.server, head + b"%x\r\n%s\r\n" % (len(asked), asked) + trailer, split=split)
            assert statuses(answer) == [401]

    run(test)


@pytest.mark.parametrize("tail", [b"0\r\nX-A: ", b"0;", b"1;"])
def test_trailers_and_extensions_have_a_bound(tail):
    async def test():
        async with echoing() as (server, seen):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(CHUNKED + tail)
            answer = b""
            with contextlib.suppress(ConnectionError):
                for _ in range(64):  # 4 MiB
                    writer.write(b"a" * 65_536)
                    await writer.drain()
                    await asyncio.sleep(0)
                answer = await asyncio.wait_for(reader.read(), BOUND)
            assert_refused(tail, answer, 431)
            assert not seen
            writer.close()

    run(test)


def test_small_chunks_are_no_abuse():
    async def test():
        async with echoing() as (server, seen):
            await sent(server, CHUNKED + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n")
            assert seen[0][2] == b"x" * 200_000

    run(test)


def test_continue_is_said_to_those_who_know_it():
    async def test():
        async with echoing() as (server, _):
            head = BODY + b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.close()
            old = await sent(server, head.replace(b"HTTP/1.1", b"HTTP/1.0") + b"x")
            assert statuses(old) == [200]

    run(test)


def test_what_breaks_behind_good_requests_leaves_them_their_answers():
    async def test():
        async with echoing() as (server, seen):
            for broken in (b"FETCH", NEXT.replace(b"Host", b"Guest"), CHUNKED + b"zz\r\n"):
                answer = await sent(server, NEXT * 3 + broken)
                assert statuses(answer) == [200, 200, 200, 400], answer
                assert len(seen) == 3
                seen.clear()

    run(test)


def test_who_is_gone_when_he_is_to_be_told_what_broke_is_no_fault_of_the_server(monkeypatch, caplog):
    """No server error is logged if the kernel knows of a reset before the event loop and ``shutdown`` fails."""

    def gone(*_):
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(asyncio.selector_events._SelectorSocketTransport, "write_eof", gone)

    async def test():
        async with echoing() as (server, seen):
            for broken in (b"FETCH", CHUNKED + b"zz\r\n"):
                started = asyncio.get_running_loop().time()
                assert statuses(await sent(server, NEXT + broken)) == [200, 400]
                assert asyncio.get_running_loop().time() < started + BOUND
            assert len(seen) == 2

    run(test)
    assert not [record for record in caplog.records if record.exc_info]


def test_requests_on_one_connection_have_a_bound():
    """Pipelined requests are limited: each takes a hundred times its bytes while it waits."""

    async def test():
        async with echoing() as (server, seen):
            answer = await sent(server, NEXT * 1500)
            found = statuses(answer)
            assert found[-1] == 400
            assert set(found[:-1]) == {200}
            assert len(found) - 1 == len(seen) <= 100

    run(test)


def test_a_body_behind_another_request_must_come_in_time():
    async def test():
        async with echoing(header_seconds=0.3) as (server, seen):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(NEXT + BODY + b"Content-Length: 10\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), BOUND)
            assert statuses(answer) == [200]
            assert len(seen) == 1
            writer.close()

    run(test)


def test_who_goes_with_requests_behind_another_leaves_nothing():
    async def test():
        async with serving(Mischief(seconds=0.01)) as running:
            request = post("/v1/completions", b'{"prompt": "Hi", "max_tokens": 1500}').replace(
                b"Connection: close\r\n", b""
            )
            _, writer = await running.connect()
            writer.write(request * 3)
            while not (await running.engine.stats()).running:
                await asyncio.sleep(0.005)
            writer.transport.abort()
            async with asyncio.timeout(5):  # the first request alone would take 15 s
                await running.quiet()

    run(test)
