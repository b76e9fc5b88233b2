"""Clients of both APIs, some of which misbehave, and the result of each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from grpc import aio

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serve.api.errors import Kind
from tests.serve import fake_engine as fake

GRPC, HTTP = "grpc", "http"
OK, LEFT, CUT = "OK", "LEFT", "CUT"
"""Complete; the client left; the connection broke visibly."""

WRONG, DOUBLED, SILENT = "wrong", "doubled", "silent"
"""Tokens of another request; duplicate tokens or tokens after the end; an incomplete stream that ends normally."""

HANGS = 90.0  # seconds after which a client counts as hung
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: close by RST
_NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
_HTTP_STATUS = {kind.http: kind.code.name for kind in reversed(Kind)}  # the first of two kinds with the same status
_CHANNELS, _NARROW_CHANNELS = 6, 20  # calls of a connection that do not read exhaust its shared flow-control window
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # time for a connection attempt on a busy machine
    ("grpc.max_reconnect_backoff_ms", 100),
)


class WrongAnswerError(AssertionError):
    """The output is not the expected one. ``kind``: `WRONG`, `DOUBLED` or `SILENT`."""

    def __init__(self, kind: str, outcome: Outcome) -> None:
        super().__init__(f"{kind}: {outcome}")
        self.kind = kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A request of a client, and its behaviour.

    Attributes:
        deadline: seconds.
        leave_after: number of events after which the client leaves; 0: right after sending the request.
        reset: the client leaves by a TCP reset; with leave_after 0 while it sends the request (HTTP).
        lingers: after the first event the client reads nothing until ``released`` of the crowd is set.
        pause: seconds that the client pauses after each event.
        logprobs: number of logprobs requested, to make the response large.
    """

    door: str
    prompt: tuple[int, ...]
    seed: int
    tokens: int
    n: int = 1
    deadline: float | None = None
    leave_after: int | None = None
    reset: bool = False
    lingers: bool = False
    pause: float = 0.0
    logprobs: int | None = None


@dataclasses.dataclass
class Outcome:
    """Result of a job. ``status``: gRPC status name for both APIs; `LEFT` or `CUT`. ``details``: gRPC's details."""

    job: Job
    status: str = ""
    details: str = ""
    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    reasons: list[str | None] = dataclasses.field(default_factory=list)
    events: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        n = self.job.n
        self.tokens, self.texts, self.reasons = [[] for _ in range(n)], [""] * n, [None] * n

    def take(self, index: int, tokens: Iterable[int], text: str, reason: str | None) -> None:
        if self.reasons[index] is not None:
            raise WrongAnswerError(DOUBLED, self)
        self.tokens[index] += tokens
        self.texts[index] += text
        self.reasons[index] = reason

    def check(self, oracle: Oracle) -> None:
        """Check that the output received is correct, and that a stream with a normal end is complete.

        Raises:
            WrongAnswerError: it is not.
        """
        if self.status == "TRUNCATED":
            raise WrongAnswerError(SILENT, self)
        for index, (tokens, text, reason) in enumerate(zip(self.tokens, self.texts, self.reasons, strict=True)):
            want, whole = oracle(self.job, index)
            if len(tokens) > len(want) or (tokens and tokens != want[: len(tokens)] and _is_doubled(tokens, want)):
                raise WrongAnswerError(DOUBLED, self)
            if tokens != want[: len(tokens)] or not whole.startswith(text) or reason not in (None, "length"):
                raise WrongAnswerError(WRONG, self)
            if (self.status == OK or reason is not None) and (tokens, text, reason) != (want, whole, "length"):
                raise WrongAnswerError(SILENT, self)


def _is_doubled(tokens: list[int], want: list[int]) -> bool:
    """Return whether the tokens, where they go wrong, repeat an earlier part of the output."""
    right = next(at for at, token in enumerate(tokens) if token != want[at])
    return any(tokens[right:] == want[at:][: len(tokens) - right] for at in range(right))


Oracle = Callable[[Job, int], tuple[list[int], str]]
"""Return the tokens and the text of an output, given its index."""


def by_rule(job: Job, index: int) -> tuple[list[int], str]:
    """Return the output of the fake engine."""
    asked = job.prompt, job.seed, index, job.tokens
    return fake.expected_tokens(*asked), fake.expected_text(*asked)


class Crowd:
    """Clients of one server.

    Args:
        narrow: use the smallest gRPC buffers.
        oracle: returns the expected output; None: unknown.

    Attributes:
        released: event that lets lingering clients read on.
        begun: jobs that linger.
    """

    def __init__(
        self, grpc_port: int, http_port: int, *, narrow: bool = False, oracle: Oracle | None = by_rule
    ) -> None:
        self._grpc_port, self._http_port, self._oracle = grpc_port, http_port, oracle
        self._options = (*_OPTIONS, *(_NARROW if narrow else ()))
        self._connections = _NARROW_CHANNELS if narrow else _CHANNELS
        self._stubs: Iterable[Any] = ()
        self._channels: list[aio.Channel] = []
        self.released = asyncio.Event()
        self.outcomes: list[Outcome] = []
        self.begun: set[Job] = set()

    async def __aenter__(self) -> Self:
        target = f"127.0.0.1:{self._grpc_port}"
        self._channels = [aio.insecure_channel(target, self._options) for _ in range(self._connections)]
        self._stubs = itertools.cycle([InferenceStub(channel) for channel in self._channels])
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def run(self, jobs: Sequence[Job], at_once: int = 200, ask: Callable[[Job], Any] | None = None) -> None:
        """Run all jobs, ``at_once`` at a time."""
        waiting = iter(jobs)

        async def client() -> None:
            for job in waiting:
                await (ask or self.ask)(job)

        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(client())

    async def ask(self, job: Job) -> Outcome:
        """Run a job and check its output. Raises TimeoutError: the stream does not end."""
        outcome = Outcome(job)
        start = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(HANGS):
                outcome.status = await (self._over_grpc if job.door == GRPC else self._over_http)(job, outcome)
        except TimeoutError as error:
            raise TimeoutError(f"{outcome}") from error
        outcome.seconds = asyncio.get_running_loop().time() - start
        if self._oracle is not None:
            outcome.check(self._oracle)
        self.outcomes.append(outcome)
        return outcome

    async def _lingered(self, job: Job, outcome: Outcome) -> None:
        if job.lingers and outcome.events == 1:
            self.begun.add(job)
            await self.released.wait()
        if job.pause:
            await asyncio.sleep(job.pause)

    # ---- gRPC

    async def _over_grpc(self, job: Job, outcome: Outcome) -> str:
        call = next(self._stubs).Generate(_message(job), timeout=job.deadline)  # type: ignore[call-overload]
        finished = False
        try:
            while outcome.events != job.leave_after:
                await self._lingered(job, outcome)
                response = await call.read()
                if response is aio.EOF:
                    return OK if finished else "TRUNCATED"
                outcome.events += 1
                if finished:
                    raise WrongAnswerError(DOUBLED, outcome)
                finished = response.WhichOneof("event") == "finished"
                if response.WhichOneof("event") == "delta":
                    _take_delta(response.delta, outcome)
            if job.leave_after == 0:  # the request may or may not have been sent
                await asyncio.sleep(random.Random(job.seed).random() * 0.02)
        except aio.AioRpcError as error:
            outcome.details = error.details() or ""
            return error.code().name
        else:
            return LEFT
        finally:
            call.cancel()

    # ---- HTTP

    async def _over_http(self, job: Job, outcome: Outcome) -> str:
        try:
            reader, writer = await self._connect(job)
        except OSError:
            return CUT
        try:
            return await self._talk(job, outcome, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return CUT
        finally:
            _reset(writer) if job.reset else writer.close()

    async def _connect(self, job: Job) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        plain = socket.socket()
        if job.lingers:  # small segments keep the kernel's buffers small
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        plain.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", self._http_port))
        except OSError:
            plain.close()
            raise
        return await asyncio.open_connection(sock=plain, limit=4096 if job.lingers else 1 << 16)

    async def _talk(
        self, job: Job, outcome: Outcome, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str:
        asked = _request(job)
        if job.reset and job.leave_after == 0:
            writer.write(asked[: random.Random(job.seed).randrange(len(asked))])
            await writer.drain()
            return LEFT
        writer.write(asked)
        if job.leave_after == 0:
            return LEFT
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            json.loads(await reader.read())["error"]["message"]
            return _HTTP_STATUS[status]
        return await self._read_events(job, outcome, reader)

    async def _read_events(self, job: Job, outcome: Outcome, reader: asyncio.StreamReader) -> str:
        said: str | None = None
        async for event in _events(reader):
            if said is not None:
                raise WrongAnswerError(DOUBLED, outcome)
            outcome.events += 1
            if event == "data: [DONE]":
                said = OK
            elif event.startswith("event: error\n"):
                said = json.loads(event.partition("data: ")[2])["error"]["code"].upper()
            else:
                for choice in json.loads(event.removeprefix("data: "))["choices"]:
                    reason = choice["finish_reason"]
                    outcome.take(choice["index"], choice.get("token_ids") or (), choice["text"], reason)
            if outcome.events == job.leave_after:
                return LEFT
            await self._lingered(job, outcome)
        return said or "TRUNCATED"


def _message(job: Job) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(
        max_tokens=job.tokens,
        ignore_eos=True,
        seed=job.seed,
        n=job.n,
        temperature=0.0 if job.n == 1 else 1.0,
        logprobs=job.logprobs,
    )
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=job.prompt), sampling=sampling)


def _take_delta(delta: pb.Delta, outcome: Outcome) -> None:
    reason = pb.FinishReason.Name(delta.finish_reason)[14:].lower() if delta.HasField("finish_reason") else None
    outcome.take(delta.output_index, delta.token_ids, delta.text, reason)


def _request(job: Job) -> bytes:
    asked = {
        "prompt": list(job.prompt),
        "max_tokens": job.tokens,
        "ignore_eos": True,
        "seed": job.seed,
        "n": job.n,
        "temperature": 0.0 if job.n == 1 else 1.0,
        "stream": True,
        "return_token_ids": True,
    }
    if job.logprobs is not None:
        asked["logprobs"] = job.logprobs
    body = json.dumps(asked).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    if job.deadline is not None:
        head.append(f"X-Request-Timeout: {job.deadline}")
    return "\r\n".join([*head, "Content-Type: application/json", "", ""]).encode() + body


async def _events(reader: asyncio.StreamReader) -> Any:
    """Yield the events of a chunked body. Raises `asyncio.IncompleteReadError`: it ends before the last chunk."""
    text = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        text += (await reader.readexactly(size + 2))[:-2]
        *events, text = text.split(b"\n\n")
        for event in events:
            yield event.decode()
    await reader.readexactly(2)
    assert not text, text


class BreakingProxy:
    """A proxy that forwards TCP connections to a port and breaks them by resets on both sides."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self.port = self.broken = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        while self._pairs:
            self._break(self._pairs.pop())

    def break_one(self, chance: random.Random) -> None:
        """Break a random open connection, if there is one."""
        if self._pairs:
            self._break(self._pairs.pop(chance.randrange(len(self._pairs))))
            self.broken += 1

    def _break(self, pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        for writer in pair:
            _reset(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            _reset(writer)
            return
        pair = (writer, back)
        self._pairs.append(pair)
        await asyncio.gather(_pump(reader, back), _pump(there, writer))
        with contextlib.suppress(ValueError):
            self._pairs.remove(pair)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    with contextlib.suppress(OSError):
        writer.close()
        await writer.wait_closed()
