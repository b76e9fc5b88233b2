"""Streaming clients of the load generator. Both do little with a message except record its arrival time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from typing import Protocol

import grpc

from benchmarks.serving.core import TEXT
from benchmarks.serving.paced import id_of
from jaxinfer.bench.http1 import HttpError, Pool
from jaxinfer.bench.sse import EventParser
from jaxinfer.protos.v1 import inference_pb2 as pb

PROMPT = tuple(range(100, 132))
_CONNECT_SECONDS = 10.0
# Rejections are timed, not retried.
_OPTIONS = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]


@dataclasses.dataclass(slots=True)
class Heard:
    """Response to one request.

    Attributes:
        row: row in the table of stamps.
        sent, ended: times on the monotonic clock.
        times, counts: arrival of each message with tokens, and its number of tokens.
        refused: whether the queue was full.
        error: any other failure.
    """

    row: int
    sent: float
    times: list[float] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    ended: float = 0.0
    refused: bool = False
    error: str | None = None

    def note(self, tokens: int) -> None:
        self.times.append(time.monotonic())
        self.counts.append(tokens)


class Client(Protocol):
    async def generate(self, row: int, tokens: int) -> Heard:
        """Send one request and read its stream to the end, in success or failure."""
        ...

    async def close(self) -> None: ...


class GrpcClient:
    """gRPC client of ``connections`` channels, which the streams share."""

    def __init__(self, port: int, connections: int) -> None:
        self._channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", _OPTIONS) for _ in range(connections)]
        method = "/jaxinfer.v1.Inference/Generate"
        self._calls = itertools.cycle([channel.unary_stream(method) for channel in self._channels])

    async def generate(self, row: int, tokens: int) -> Heard:
        sampling = pb.SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0, temperature=0.0)
        request = pb.GenerateRequest(request_id=id_of(row), sampling=sampling, token_ids=pb.TokenIds(ids=PROMPT))
        message, parse, whole = request.SerializeToString(), pb.GenerateResponse.FromString, False
        heard = Heard(row, time.monotonic())
        try:
            async for raw in next(self._calls)(message):
                response = parse(raw)
                if count := len(response.delta.token_ids):
                    heard.note(count)
                whole = response.HasField("finished")
        except grpc.aio.AioRpcError as error:
            heard.refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            heard.error = None if heard.refused else f"{error.code().name}: {error.details()}"
        else:
            heard.error = None if whole else "the stream ended without its last message"
        heard.ended = time.monotonic()
        return heard

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


class HttpClient:
    """HTTP client with a connection for each stream."""

    def __init__(self, port: int) -> None:
        self._pool = Pool("127.0.0.1", port, None, _CONNECT_SECONDS)

    async def generate(self, row: int, tokens: int) -> Heard:
        message = _http_request(row, tokens)
        heard, events = Heard(row, time.monotonic()), EventParser()
        last = b""

        def take(status: int, data: bytes) -> None:
            nonlocal last
            if status != 200:
                heard.error = f"{status}: {data[:200]!r}"
                return
            count = 0
            for event in events.feed(data):
                last = event
                count += 0 if event == b"[DONE]" else _tokens_in(event)
            if count:
                heard.note(count)

        try:
            answer = await self._pool.exchange(message, take)
        except (OSError, TimeoutError, HttpError) as error:
            heard.error = f"{type(error).__name__}: {error}"
        else:
            heard.refused = answer.status == 429
            if heard.refused:
                heard.error = None
            elif heard.error is None and last != b"[DONE]":
                heard.error = "the stream ended without [DONE]"
        heard.ended = time.monotonic()
        return heard

    async def close(self) -> None:
        self._pool.close()


def _http_request(row: int, tokens: int) -> bytes:
    fields = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "seed": 0, "temperature": 0.0}
    body = json.dumps({"model": "paced", "stream": True, "request_id": id_of(row), **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _tokens_in(event: bytes) -> int:
    """Return the number of tokens in an event: all tokens have the same text."""
    choices = json.loads(event).get("choices") or [{"text": ""}]
    return len(choices[0]["text"]) // len(TEXT)
