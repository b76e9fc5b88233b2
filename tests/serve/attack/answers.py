"""Checks of the responses that a server may give to a possibly invalid request."""

from __future__ import annotations

import dataclasses
import json
import re

from jaxinfer.protos.v1 import inference_pb2 as pb
from tests.serve import fuzz
from tests.serve.doors import Doors

REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"}
STATUSES = {200, 400, 404, 405, 408, 409, 413, 417, 429, 431, 504, 505}
OPAQUE = re.compile(rb"internal error [0-9a-f]{32}")
WHOLE = re.compile(rb'data: (\[DONE\]|\{"type":"(message_stop|response\.(completed|incomplete|failed))"[^\n]*)\n\n\Z')
"""Pattern of the end of a complete HTTP event stream."""
_VARIABLE = re.compile(r"""'[^']*'|"[^"]*"|[\d.e+-]*\d|\b(?:nan|inf|None|True|False)\b""")
_NESTED = re.compile(r"[\[{][^\[\]{}]*[\]}]")


@dataclasses.dataclass(frozen=True)
class Answer:
    """A response class. ``kind``: API and status; ``said``: the text of an error, without the values that it quotes."""

    kind: str
    said: str = ""


async def check(client: Doors, request: fuzz.Request) -> Answer:
    """Send a request and return the class of its response.

    Raises:
        AssertionError: the response is not allowed.
    """
    if isinstance(request, fuzz.RpcRequest):
        return await _check_rpc(client, request)
    return await (_check_http(client, request) if request.raw is None else _check_raw(client, request.raw))


def _said(message: str) -> str:
    found = _VARIABLE.sub("_", message)
    while (shorter := _NESTED.sub("_", found)) != found:
        found = shorter
    return found[:100]


async def _check_rpc(client: Doors, request: fuzz.RpcRequest) -> Answer:
    answer = await client.rpc(request.path, *request.messages)
    # grpc.aio's client reports this itself if the server ends a call before all of its requests are written.
    cut_short = len(request.messages) > 1 and answer.message == "Internal error from Core"
    # The Open Inference Protocol has its own deadline; a deadline of the client means that the server hangs.
    too_late = answer.code == "DEADLINE_EXCEEDED" and answer.message.startswith("the deadline ha")
    assert answer.code in REFUSALS | {"OK"} or too_late or cut_short, answer
    said = _said(answer.message)
    for raw in answer.messages:
        message = fuzz.message_class(request.path).FromString(raw)
        assert not OPAQUE.search(raw), message
        if isinstance(message, pb.GenerateResponse) and message.WhichOneof("event") == "error":
            assert message.error.code != 13, message
            said = said or _said(message.error.message)  # the first message only: combinations of many are too numerous
    if answer.code == "OK" and request.path.endswith("/Generate"):
        assert pb.GenerateResponse.FromString(answer.messages[-1]).WhichOneof("event") == "finished"
    return Answer("rpc cut short" if cut_short else f"rpc {answer.code}", said)


async def _check_raw(client: Doors, data: bytes) -> Answer:
    page = await client.raw(data)
    assert page.status in STATUSES | {0}, page
    return Answer(f"raw {page.status}")


async def _check_http(client: Doors, request: fuzz.HttpRequest) -> Answer:
    page = await client.http(request.method, request.path, request.body, request.headers)
    if page.status == 0:
        # The server closes the connection of a body over the size limit after it has discarded enough of it. Like any
        # client, resend the request that followed on this connection.
        page = await client.http(request.method, request.path, request.body, request.headers)
    assert page.status in STATUSES, page
    assert not OPAQUE.search(page.body), page
    said = ""
    if page.headers.get("content-type", "").startswith("text/event-stream"):
        assert WHOLE.search(page.body) or b"event: error" in page.body, page
    elif page.status != 200:
        said = json.loads(page.body)["error"]["message"]
        assert said
    return Answer(f"http {page.status}", _said(said))
