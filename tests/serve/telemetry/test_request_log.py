"""Tests of the request log: one line per request, also for rejected ones, without sensitive fields."""

import asyncio
import json
import logging
import re
import urllib.error
import urllib.request

import grpc
import pytest

from jaxinfer.client import Client
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call, Usage
from jaxinfer.serve.runtime.logs import BURST, REQUESTS, JsonFormatter, RateLimit, TextFormatter
from jaxinfer.serve.telemetry.request_log import REFUSED, RequestLog
from jaxinfer.serve.telemetry.tracing import Tracing
from jaxinfer.types import Request
from tests.serve.frontend.test_frontend import MESSAGES, PROMPT, served, whole
from tests.serve.live import live_fake

SECRET = "the text of nobody's business"


@pytest.fixture
def lines(caplog):
    """Return a function that returns the fields of each request line logged."""
    caplog.set_level(logging.INFO)

    def found() -> list[dict]:
        mine = [each for each in caplog.records if each.name in (REQUESTS, REFUSED)]
        return [json.loads(JsonFormatter().format(each)) for each in mine]

    return found


def about(line: dict) -> dict:
    return {name: value for name, value in line.items() if name not in ("time", "level", "logger", "ttft", "seconds")}


def test_an_answer_has_a_line_with_tokens_and_times(caplog):
    caplog.set_level(logging.INFO)
    now = iter([10.0, 10.25, 12.0])
    line = RequestLog(clock=lambda: next(now)).begin(Call(SECRET, tenant="alice", request_id="r-1"))
    line.accepted(Request("r-1", (1, 2, 3), SamplingParams()))
    line.token()
    line.finished(Usage(3, 7, 2), ["stop", "stop", "length"])
    (record,) = caplog.records
    text = TextFormatter().format(record)
    assert text.endswith(
        "info    jaxinfer.serve.requests: ended request_id='r-1' key='alice' prompt_tokens=3 cached_tokens=2 "
        "output_tokens=7 ttft=0.25 seconds=2.0 finish='stop,length'"
    )


def test_each_generation_has_one_line_whatever_becomes_of_it(lines):
    async def test():
        tracing = Tracing(log=RequestLog())
        async with served(tracing=tracing) as run:
            for call in (
                Call(PROMPT, {"max_tokens": 3, "ignore_eos": True}, request_id="whole", tenant="alice"),
                Call(PROMPT, {"max_tokens": 3, "n": 2, "ignore_eos": True}, request_id="two"),
            ):
                await whole(run.frontend, call)
            async with await run.frontend.generate(Call(PROMPT, {"max_tokens": 1000}, request_id="left")) as left:
                await anext(left)
            with pytest.raises(ServeError):
                await run.frontend.generate(Call(SECRET, {"temperature": -1.0}, request_id="bad", tenant="bob"))
            await run.frontend.score("Hi", ["a", "bc"], tenant="alice")
            with pytest.raises(ServeError):
                await run.frontend.score("Hi", [])

    asyncio.run(test())
    told = lines()
    ended = [each for each in told if each["logger"] == REQUESTS]
    assert [about(each) for each in ended[:2]] == [
        {
            "message": "ended",
            "request_id": "whole",
            "key": "alice",
            "prompt_tokens": 5,
            "cached_tokens": 0,
            "output_tokens": 3,
            "finish": "length",
        },
        {
            "message": "ended",
            "request_id": "two",
            "prompt_tokens": 5,
            "cached_tokens": 0,
            "output_tokens": 6,
            "finish": "length",
        },
    ]
    assert 0 <= ended[0]["ttft"] <= ended[0]["seconds"]
    assert (ended[2]["request_id"], ended[2]["error"], ended[2]["output_tokens"] >= 1) == ("left", "cancelled", True)
    assert (ended[3]["finish"], ended[3]["key"], ended[3]["prompt_tokens"]) == ("score", "alice", 3)
    refused = [about(each) for each in told if each["logger"] == REFUSED]
    assert refused == [
        {"message": "refused", "request_id": "bad", "key": "bob", "error": "invalid", "field": "temperature"},
        {"message": "refused", "error": "invalid", "field": "continuations"},
    ]
    assert len(told) == 6
    assert SECRET not in json.dumps(told)


def test_every_door_has_a_line_for_what_it_refuses(lines, tmp_path, caplog):
    """Every API logs one line per rejection, also before the engine is reached, and one per completed gRPC call."""

    def post(url: str, path: str, body: dict) -> None:
        headers = {"content-type": "application/json", "x-request-id": "mine"}
        urllib.request.urlopen(urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)).read()

    with live_fake(tmp_path) as run:
        for path, body in (
            ("/v1/completions", {"prompt": SECRET, "temprature": 1}),
            ("/v1/completions", {"prompt": SECRET, "temperature": -1}),
            ("/v1/nothing", {}),
        ):
            with pytest.raises(urllib.error.HTTPError):
                post(run.url, path, body)
        post(run.url, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "stream": True})
        with Client(run.target) as client:
            client.generate("Hi", max_tokens=2, request_id="rpc")
            with pytest.raises(Exception, match="other"):
                client.tokenize("Hi", model="other")
        with grpc.insecure_channel(run.target) as channel:
            twice = [pb.GenerateRequest(prompt="Hi", request_id="twice", sampling={"max_tokens": 1})] * 2
            assert sum(each.HasField("error") for each in InferenceStub(channel).GenerateBatch(iter(twice))) == 1
    told = [about(each) for each in lines()]
    peers = [peer for each in told if (peer := each.pop("peer", None))]
    assert [(each["message"], each.get("request_id"), each.get("route"), each.get("error")) for each in told[:3]] == [
        ("refused", "mine", "/v1/completions", "invalid"),
        ("refused", "mine", "/v1/completions", "invalid"),  # rejected by the front end
        ("refused", "mine", "other", "not_found"),
    ]
    assert told[0]["field"] == "temprature"
    assert [each.get("path") for each in told[:3]] == [None, None, "/v1/nothing"]
    assert all(re.fullmatch(r"127\.0\.0\.1:[0-9]+", peer) for peer in peers)
    assert len(peers) == 5
    assert [each["request_id"] for each in told[3:5]] == ["mine", "rpc"]
    assert told[5] == {
        "message": "refused",
        "route": "jaxinfer.v1.Inference/Tokenize",
        "error": "not_found",
        "field": "model",
    }
    (again,) = [each for each in told[6:] if each["message"] == "refused"]
    assert (again["route"], again["error"]) == ("jaxinfer.v1.Inference/GenerateBatch", "exists")
    assert [each["request_id"] for each in told[6:] if each["message"] == "ended"] == ["twice"]
    assert len(told) == 8
    assert SECRET not in caplog.text


def test_the_log_of_requests_can_be_off(lines, tmp_path):
    with live_fake(tmp_path, log_requests=False) as run, Client(run.target) as client:
        client.generate("Hi", max_tokens=2)
        with pytest.raises(Exception, match="other"):
            client.tokenize("Hi", model="other")
    assert lines() == []


def test_lines_of_answers_are_bounded_by_the_engine_and_those_of_refusals_by_their_rate():
    def admitted(name: str) -> int:
        limiter = RateLimit(lambda: 0.0)
        record = logging.LogRecord(name, logging.INFO, "here", 1, "ended", (), None)
        return sum(limiter.filter(record) for _ in range(3 * BURST))

    assert (admitted(REQUESTS), admitted(REFUSED)) == (3 * BURST, BURST)


def test_an_error_is_told_once(lines):
    error = ServeError(Kind.INVALID, "no")
    log = RequestLog()
    log.begin(Call("a")).failed(error)
    log.refused(error, "/v1/completions")
    log.refused(ServeError(Kind.CANCELLED, "the client has left"), "/v1/completions")
    assert len(lines()) == 1
    assert grpc.StatusCode.INVALID_ARGUMENT is error.kind.code
