"""Front end side of the stream to an engine core: a `Backend` for an engine in another process. No jax."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import grpc

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.lora.store import LoadedLoRA, LoRAError
from jaxinfer.protos.internal import core_pb2 as pb
from jaxinfer.protos.internal.core_pb2_grpc import CoreStub
from jaxinfer.sampling_params import QueueFullError, RequestError
from jaxinfer.serve.api.streams import Closed, DeltaStream, EngineDeadError
from jaxinfer.serve.core import wire
from jaxinfer.serve.core.outbox import Outbox
from jaxinfer.types import LoRARef, PositionLogprobs, Request, SequenceDelta

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a prompt's log probabilities may be large
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),  # the socket appears as soon as the core has started
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

_DESCRIPTORS = 16
"""Upper bound on the descriptors that a core's start opens here: its folder, three pipes, gRPC's sockets and pollers.
"""


def require_descriptors() -> None:
    """Check that descriptors are left for another core: without any, gRPC's runtime would end this process.

    Raises:
        OSError: there are too few.
    """
    with contextlib.ExitStack() as descriptors:
        for _ in range(_DESCRIPTORS):
            descriptors.callback(os.close, os.open(os.devnull, os.O_RDONLY))


class RefusedError(RuntimeError):
    """Error for a request that the core cannot serve; the message is one sentence."""


class LinkStream(DeltaStream):
    """The delta stream of one request, which the core identifies by ``number``."""

    def __init__(self, request: Request, leave: Callable[[LinkStream], None], number: int) -> None:
        super().__init__(request, leave)
        self.number = number
        self._parts: dict[int, list[PositionLogprobs | None]] = {}

    def take_message(self, message: pb.Delta) -> None:
        """Take a delta that is not a plain token, or a chunk of a large one, which is buffered until it is complete."""
        if message.continues:
            self._parts.setdefault(message.index, []).extend(wire.positions_of(message.prompt_logprobs))
            return
        delta = wire.delta_of(message, self.request.request_id)
        if (parts := self._parts.pop(message.index, None)) is not None:
            delta.prompt_logprobs = parts + (delta.prompt_logprobs or [])
        self.take(delta)


class CoreLink:
    """The connection to one engine core, until the stream ends; must be used from one event loop.

    Args:
        socket: path of the core's unix socket, which may not exist yet.
        observe: called with each lifecycle message of the core (startup, ready, failed, beat, fault) and KV events.
    """

    def __init__(self, socket: str, observe: Callable[[pb.FromCore], None]) -> None:
        self._socket, self._observe = socket, observe
        self._numbers = itertools.count(1)
        self._streams: dict[int, LinkStream] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outbox: Outbox[pb.ToCore] = Outbox()
        self._closed: Closed | None = None

    # ---- lifecycle

    async def run(self) -> None:
        """Transfer messages until the stream ends.

        Raises:
            OSError: no descriptors are left for it.
        """
        require_descriptors()
        async with grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS) as channel:
            call = CoreStub(channel).Serve(wait_for_ready=True)
            writing = asyncio.create_task(self._write(call))
            try:
                with contextlib.suppress(grpc.aio.AioRpcError):  # the core is gone: `close` reports it
                    async for message in call:
                        self._take(message)
            finally:
                writing.cancel()
                call.cancel()
                self.close("the engine core is gone")

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader gets the error too
            await self._outbox.run(call.write)

    def stop(self) -> None:
        """Request that the core aborts its requests and exits."""
        self._outbox.put(pb.ToCore(stop=pb.Stop()))

    def close(self, reason: str) -> None:
        """End all streams and pending calls with `EngineDeadError`. Only the first reason counts."""
        if self._closed is not None:
            return
        self._closed = closed = Closed(reason)
        for stream in list(self._streams.values()):  # a listening reader leaves at once
            stream.take(closed)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(closed.error())
        self._streams.clear()
        self._answers.clear()

    # ---- Backend

    async def submit(self, request: Request) -> LinkStream:
        """See `Backend.submit`."""
        number = next(self._numbers)
        stream = LinkStream(request, self._leave, number)
        message = pb.Submit(number=number, request=wire.request_message(request, time.monotonic()))
        self._check()
        self._streams[number] = stream
        try:
            accepted = await self._ask(number, pb.ToCore(submit=message))
        except asyncio.CancelledError:
            self._leave(stream)
            raise
        except (RequestError, EngineDeadError):
            self._streams.pop(number, None)
            raise
        seed = wire.seed_of(accepted)
        if seed != request.params.seed:
            stream.request = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=seed))
        return stream

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """See `Backend.abort`. Does not wait: the stream's last delta confirms it."""
        self._check()
        self._outbox.put(pb.ToCore(abort=pb.Abort(request_id=request_id, index=index)))

    async def stats(self) -> EngineStats:
        return wire.stats_of((await self._question(pb.Ask.STATS)).stats)

    async def reset_prefix_cache(self) -> int:
        return int((await self._question(pb.Ask.RESET_PREFIX_CACHE)).pages)

    # ---- LoRABackend

    async def load_lora(self, name: str, path: str) -> LoadedLoRA:
        """See `LoRABackend`."""
        number = next(self._numbers)
        message = pb.LoadLora(number=number, name=name, path=path)
        answer: pb.Answer = await self._ask(number, pb.ToCore(load_lora=message))
        if answer.WhichOneof("kind") == "refusal":
            raise LoRAError(answer.refusal)
        return wire.lora_of(answer.lora)

    def unload_lora(self, name: str) -> None:
        """See `LoRABackend`."""
        self._check()
        self._outbox.put(pb.ToCore(unload_lora=name))

    def release_lora(self, ref: LoRARef) -> None:
        """See `LoRABackend`."""
        self._check()
        self._outbox.put(pb.ToCore(release_lora=pb.Lora(**ref._asdict())))

    # ---- other queries

    async def check(self) -> None:
        """Check that all slots and pages are accounted for; a leak is a fault that ends the engine."""
        await self._question(pb.Ask.CHECK)

    async def start_profile(self) -> None:
        """Start a profile. Raises `RefusedError` if there is no folder for traces, or a profile is running."""
        await self._question(pb.Ask.START_PROFILE)

    async def stop_profile(self) -> str:
        """Stop the profile and return the folder with the trace.

        Raises:
            RefusedError: no profile is running.
        """
        return str((await self._question(pb.Ask.STOP_PROFILE)).folder)

    async def _question(self, question: pb.Ask.Question) -> pb.Answer:
        number = next(self._numbers)
        answer: pb.Answer = await self._ask(number, pb.ToCore(ask=pb.Ask(number=number, question=question)))
        if answer.WhichOneof("kind") == "refusal":
            raise RefusedError(answer.refusal)
        return answer

    async def _ask(self, number: int, message: pb.ToCore) -> Any:
        self._check()
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        self._outbox.put(message)
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    def _check(self) -> None:
        if self._closed is not None:
            raise self._closed.error()

    def _leave(self, stream: DeltaStream) -> None:
        assert isinstance(stream, LinkStream)
        if self._streams.pop(stream.number, None) is not None:
            self._outbox.put(pb.ToCore(leave=pb.Leave(number=stream.number)))

    # ---- incoming messages

    def _take(self, message: pb.FromCore) -> None:
        match message.WhichOneof("kind"):
            case "deltas":
                self._take_deltas(message.deltas)
            case "accepted":
                self._settle(message.accepted.number, message.accepted)
            case "answer":
                self._settle(message.answer.number, message.answer)
            case "refused":
                self._refuse(message.refused)
            case _:
                self._observe(message)

    def _take_deltas(self, deltas: pb.Deltas) -> None:
        streams = self._streams
        for number, index, token in zip(deltas.streams, deltas.indexes, deltas.tokens, strict=True):
            stream = streams.get(number)
            if stream is not None:  # else its reader has left
                stream.take(SequenceDelta(stream.request.request_id, index, [token]))
        for delta in deltas.others:
            stream = streams.get(delta.stream)
            if stream is not None:
                stream.take_message(delta)
                if stream.ended:
                    streams.pop(delta.stream, None)  # a listening reader may have left already

    def _settle(self, number: int, value: object) -> None:
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(value)

    def _refuse(self, refused: pb.Refused) -> None:
        answer = self._answers.get(refused.number)
        if answer is not None and not answer.done():
            answer.set_exception(_refusal(refused))


def _refusal(refused: pb.Refused) -> Exception:
    match refused.kind:
        case pb.Refused.QUEUE_FULL:
            return QueueFullError(refused.message)
        case pb.Refused.REQUEST:
            return RequestError(refused.place if refused.HasField("place") else None, refused.message)
        case _:
            return EngineDeadError(refused.message)
