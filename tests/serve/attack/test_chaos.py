"""Chaos test with all faults at once, and tests that its accounting detects forbidden results."""

import asyncio
import contextlib
import json
import random

import pytest

from tests.serve import fake_engine as fake
from tests.serve.attack import chaos
from tests.serve.attack.jobs import Jobs, KnownJobs
from tests.serve.attack.victim import victim
from tests.serve.crowd import HTTP, Crowd, Job

JOB = Job(door=HTTP, prompt=(fake.FIRST_BYTE + 3,) * 3, seed=1, tokens=4)
TOKENS = fake.expected_tokens(JOB.prompt, JOB.seed, 0, JOB.tokens)
assert max(TOKENS) < fake.FIRST_BYTE + 128  # one character per token
END = "data: [DONE]\n\n"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [12, 60])  # longer runs: make chaos
def test_faults_at_random_under_load(tmp_path_factory, seconds, seed):
    with victim(tmp_path_factory.mktemp("v")) as server:
        report = asyncio.run(chaos.run(server, Jobs(), seconds, seed))
    print("\n".join(report.lines()))
    assert report.wrong() == []
    assert report.ends["whole"] > chaos.CLIENTS * 10
    assert report.faults.total() > seconds / 6


@pytest.mark.slow
def test_the_same_of_a_real_engine(tmp_path_factory, seed):
    jobs = KnownJobs(random.Random(seed))

    async def attack() -> chaos.Report:
        await jobs.learn(server)
        return await chaos.run(server, jobs, 120, seed)

    with victim(tmp_path_factory.mktemp("v"), "demo") as server:
        report = asyncio.run(attack())
    print("\n".join(report.lines()))
    assert report.wrong() == []


def event(tokens: list[int], reason: str | None = None) -> str:
    text = bytes(token - fake.FIRST_BYTE for token in tokens).decode(errors="replace")
    choice = {"index": 0, "token_ids": tokens, "text": text, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ((event(TOKENS, "length"), END), "whole"),
        ((event(TOKENS[:2]), event(TOKENS[2:], "length"), END), "whole"),
        ((event(TOKENS[:2]),), "silent"),
        ((event(TOKENS[:2], "length"), END), "silent"),
        ((event(TOKENS[:2]), END), "silent"),
        ((event(TOKENS[:2]), event(TOKENS[:2]), END), "doubled"),
        ((event(TOKENS, "length"), event(TOKENS, "length"), END), "doubled"),
        ((event(TOKENS, "length"), END, event(TOKENS)), "doubled"),
        ((event([TOKENS[0] + 1]), END), "wrong"),
        ((event(TOKENS[:1]), 'event: error\ndata: {"error": {"code": "unavailable"}}\n\n'), "told"),
        ((event(TOKENS[:1]), 'event: error\ndata: {"error": {"code": "internal"}}\n\n'), chaos.UNTOLD),
        ((event(TOKENS[:1]), None), "cut"),
        ((event(TOKENS[:1]), ...), "lost"),
    ],
)
def test_the_books_show_what_became_of_a_stream(events, what, monkeypatch):
    monkeypatch.setattr("tests.serve.crowd.HANGS", 0.2)
    report = chaos.Report(0, 0.0)

    async def story() -> None:
        async with lying(events) as port, Crowd(port, port) as crowd:
            assert await chaos.Load(report, Jobs(), random.Random(0)).one(crowd, JOB) == what

    asyncio.run(story())
    assert report.ends == {what: 1}
    assert len(report.trouble) == (what not in ("whole", "told", "cut"))


@contextlib.asynccontextmanager
async def lying(events: tuple[object, ...]):
    """Yield the port of a server that sends these events. None: it resets the connection; ``...``: it pauses 1 s."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for each in events:
            if each is None:
                writer.transport.abort()
                return
            if each is ...:
                await asyncio.sleep(1.0)
                continue
            data = str(each).encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
