"""Thousands of requests that are structured but wrong, over both doors of a whole server: it answers, and lives."""

import asyncio
import collections
import gc
import json
import re

import pytest

from jaxinfer.v1 import inference_pb2 as pb
from tests.serve import fuzz
from tests.serve.doors import Doors, doors
from tests.serve.processes import ServerProcess, fake_server
from tests.serve.test_bad_inputs import check_normal

FAST, SLOW = 1_500, 50_000
AT_ONCE = 16
SEED = 4
# One request makes at most so many tokens: what is sent is to be refused, not to be worked on.
LIMITS = {"n": 8, "message_bytes": 1 << 20}
CONTEXT = "128"
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"}
STATUSES = {200, 400, 404, 405, 408, 409, 413, 429, 431, 504}
OPAQUE = re.compile(rb"internal error [0-9a-f]{32}")
# Of the process of the doors, after a fifth of the requests has warmed it up. Python and gRPC keep some for reuse.
MAX_GROWTH_MIB = 24


@pytest.mark.parametrize("count", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_fuzzed_requests_are_answered_and_leave_nothing_behind(tmp_path, count):
    with fake_server(tmp_path, "--context", CONTEXT, header_seconds=1.0, limits=LIMITS) as server:
        found = asyncio.run(_send(server, count))
        assert server.process.poll() is None
        log = server.log()
        assert "internal error" not in log, log[-5000:]
        assert "Traceback" not in log, log[-5000:]
    # That it is a mixture: much is refused, much is not.
    assert found["rpc OK"] > count / 20
    assert found["rpc INVALID_ARGUMENT"] > count / 20
    assert found["http 200"] > count / 20
    assert found["http 400"] > count / 20
    print("\n" + ", ".join(f"{what}: {number}" for what, number in found.most_common()))


async def _send(server: ServerProcess, count: int) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    async with doors(server) as client:
        todo = enumerate(fuzz.requests(SEED, count))
        warm = count // 5
        await _work(client, found, todo, warm)
        await check_normal(client)
        files, resident = server.open_files(), server.resident_mib()
        await _work(client, found, todo, count - warm)
        await check_normal(client)
        grown = server.resident_mib() - resident
        print(f"\nresident: {resident:.0f} MiB, {grown:+.1f} MiB; open files: {files}, {server.open_files()}")
        assert grown < MAX_GROWTH_MIB
        assert server.open_files() <= files + AT_ONCE
    assert sum(found.values()) == count
    return found


async def _work(client: Doors, found, todo, count: int):
    """So many requests, some at once."""
    left = iter(range(count))

    async def worker():
        for _ in left:
            number, request = next(todo)
            try:
                found[await _check(client, request)] += 1
            except Exception as error:
                error.add_note(f"request {number} of seed {SEED}: {request!r:.2000}")
                raise

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(worker())
    gc.collect()


async def _check(client: Doors, request: fuzz.RpcRequest | fuzz.HttpRequest) -> str:
    """What kind of an answer came."""
    if isinstance(request, fuzz.RpcRequest):
        return await _check_rpc(client, request)
    return await _check_http(client, request)


async def _check_rpc(client: Doors, request: fuzz.RpcRequest) -> str:
    answer = await client.rpc(request.path, *request.messages)
    # grpc.aio's client says so by itself where the server ends a call before all of its requests are written.
    cut_short = len(request.messages) > 1 and answer.message == "Internal error from Core"
    # The Open Inference Protocol has a deadline of its own; the client's is for what hangs.
    too_late = answer.code == "DEADLINE_EXCEEDED" and answer.message.startswith("the deadline ha")
    assert answer.code in REFUSALS | {"OK"} or too_late or cut_short, answer
    for raw in answer.messages:
        message = fuzz.message_class(request.path).FromString(raw)
        assert not OPAQUE.search(raw), message
        if isinstance(message, pb.GenerateResponse) and message.WhichOneof("event") == "error":
            assert message.error.code != 13, message
    if answer.code == "OK" and request.path.endswith("/Generate"):
        assert pb.GenerateResponse.FromString(answer.messages[-1]).WhichOneof("event") == "finished"
    return "rpc cut short" if cut_short else f"rpc {answer.code}"


async def _check_http(client: Doors, request: fuzz.HttpRequest) -> str:
    if request.raw is not None:
        page = await client.raw(request.raw)
        assert page.status in STATUSES | {0}, page
        return f"raw {page.status}"
    page = await client.http(request.method, request.path, request.body, request.headers)
    if page.status == 0:
        # The connection of a body that was too large is closed when enough of it was thrown away: what came next on it
        # is sent again, as every client does.
        page = await client.http(request.method, request.path, request.body, request.headers)
    assert page.status in STATUSES, page
    assert not OPAQUE.search(page.body), page
    if page.headers.get("content-type", "").startswith("text/event-stream"):
        assert page.body.endswith(b"data: [DONE]\n\n") or b"event: error" in page.body.rpartition(b"\n\n\n")[2], page
    elif page.status != 200:
        assert json.loads(page.body)["error"]["message"]
    return f"http {page.status}"
