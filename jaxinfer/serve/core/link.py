"""The front end's side of the stream: a `Backend` whose engine runs in another process. No jax."""

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
from jaxinfer.serve.core import wire
from jaxinfer.serve.core.outbox import Outbox
from jaxinfer.serve.streams import Closed, DeltaStream, EngineDeadError
from jaxinfer.types import LoRARef, PositionLogprobs, Request, SequenceDelta

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a prompt's log probabilities may be large
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),  # the socket is there as soon as the core has started
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

_DESCRIPTORS = 16
"""More than a core's start opens here: its folder, three pipes, gRPC's sockets and what it polls with."""


def require_descriptors() -> None:
    """Raises:
    OSError: there are too few for another core. gRPC's runtime would end this process where it finds none.
    """
    with contextlib.ExitStack() as descriptors:
        for _ in range(_DESCRIPTORS):
            descriptors.callback(os.close, os.open(os.devnull, os.O_RDONLY))


class RefusedError(RuntimeError):
    """The core cannot do what it was asked for; one sentence."""


class LinkStream(DeltaStream):
    """The deltas of one request, by the ``number`` under which the core knows it."""

    def __init__(self, request: Request, leave: Callable[[LinkStream], None], number: int) -> None:
        super().__init__(request, leave)
        self.number = number
        self._parts: dict[int, list[PositionLogprobs | None]] = {}

    def take_message(self, message: pb.Delta) -> None:
        """A delta that was not plain, or a part of one: nobody sees it before it is whole."""
        if message.continues:
            self._parts.setdefault(message.index, []).extend(wire.positions_of(message.prompt_logprobs))
            return
        delta = wire.delta_of(message, self.request.request_id)
        if (parts := self._parts.pop(message.index, None)) is not None:
            delta.prompt_logprobs = parts + (delta.prompt_logprobs or [])
        self.take(delta)


class CoreLink:
    """One core, from its socket's first day to the end of the stream. Belongs to one event loop.

    Args:
        socket: path of the core's unix socket, which need not be there yet.
        observe: called with each message that tells of the core's life: startup, ready, failed, beat, fault.
    """

    def __init__(self, socket: str, observe: Callable[[pb.FromCore], None]) -> None:
        self._socket, self._observe = socket, observe
        self._numbers = itertools.count(1)
        self._streams: dict[int, LinkStream] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outbox: Outbox[pb.ToCore] = Outbox()
        self._closed: Closed | None = None

    # ---- life

    async def run(self) -> None:
        """Carry messages until the stream ends, however it does.

        Raises:
            OSError: there is no descriptor left for it.
        """
        require_descriptors()
        async with grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS) as channel:
            call = CoreStub(channel).Serve(wait_for_ready=True)
            writing = asyncio.create_task(self._write(call))
            try:
                with contextlib.suppress(grpc.aio.AioRpcError):  # the core is gone, as `close` says
                    async for message in call:
                        self._take(message)
            finally:
                writing.cancel()
                call.cancel()
                self.close("the engine core is gone")

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader hears of it too
            await self._outbox.run(call.write)

    def stop(self) -> None:
        """Tell the core to abort what runs and to end."""
        self._outbox.put(pb.ToCore(stop=pb.Stop()))

    def close(self, reason: str) -> None:
        """End every stream and every question by `EngineDeadError`. The first reason counts."""
        if self._closed is not None:
            return
        self._closed = closed = Closed(reason)
        for stream in list(self._streams.values()):  # a reader that listens leaves at once
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
        """See `Backend.abort`. It does not wait: the stream's last delta says that it is done."""
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

    # ---- further questions

    async def check(self) -> None:
        """A fault, which ends the engine, unless all slots and pages are accounted for."""
        await self._question(pb.Ask.CHECK)

    async def start_profile(self) -> None:
        """Raises:
        RefusedError: there is no folder for traces, or one is being taken.
        """
        await self._question(pb.Ask.START_PROFILE)

    async def stop_profile(self) -> str:
        """The folder with the trace.

        Raises:
            RefusedError: none is being taken.
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

    # ---- what comes

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
            if stream is not None:  # else its reader has gone
                stream.take(SequenceDelta(stream.request.request_id, index, [token]))
        for delta in deltas.others:
            stream = streams.get(delta.stream)
            if stream is not None:
                stream.take_message(delta)
                if stream.ended:
                    streams.pop(delta.stream, None)  # a reader that listens has left already

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
