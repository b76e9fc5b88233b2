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
from jaxinfer.sampling_params import QueueFullError, RequestError
from jaxinfer.serve.api.streams import Closed, DeltaStream, EngineDeadError
from jaxinfer.serve.core import messages
from jaxinfer.serve.core.operations import AnyOperation, WeightState
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

    def take_part(self, part: messages.Part) -> None:
        """Buffer a part of a large delta until the delta follows."""
        self._parts.setdefault(part.index, []).extend(part.prompt_logprobs)

    def take_whole(self, delta: SequenceDelta) -> None:
        """Take a delta that is not a plain token, after its parts."""
        if (parts := self._parts.pop(delta.index, None)) is not None:
            delta.prompt_logprobs = parts + (delta.prompt_logprobs or [])
        self.take(delta)


class CoreLink:
    """The connection to one engine core, until the stream ends; must be used from one event loop.

    Args:
        socket: path of the core's unix socket, which may not exist yet.
        observe: called with each message that concerns no single request or question.
    """

    def __init__(self, socket: str, observe: Callable[[messages.Lifecycle], None]) -> None:
        self._socket, self._observe = socket, observe
        self._numbers = itertools.count(1)
        self._streams: dict[int, LinkStream] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._outbox: Outbox[bytes] = Outbox()
        self._closed: Closed | None = None

    # ---- lifecycle

    async def run(self) -> None:
        """Transfer messages until the stream ends.

        Raises:
            OSError: no descriptors are left for it.
            MessageError: the core has sent something else.
        """
        require_descriptors()
        async with grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS) as channel:
            call = channel.stream_stream(messages.METHOD)(wait_for_ready=True)
            writing = asyncio.create_task(self._write(call))
            try:
                with contextlib.suppress(grpc.aio.AioRpcError):  # the core is gone: `close` reports it
                    async for data in call:
                        self._take(messages.decode_from_core(data))
            finally:
                writing.cancel()
                call.cancel()
                self.close("the engine core is gone")

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader gets the error too
            await self._outbox.run(call.write)

    def stop(self) -> None:
        """Request that the core aborts its requests and exits."""
        self._send(messages.Stop())

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
        message = messages.Submit(number, messages.encode_request(request, time.monotonic()))
        # The engine has the images now, which may be many megabytes: they are not kept here as long as the stream.
        stream = LinkStream(dataclasses.replace(request, images=()), self._leave, number)
        self._check()
        self._streams[number] = stream
        try:
            seed: int = await self._ask(message)
        except asyncio.CancelledError:
            self._leave(stream)
            raise
        except (RequestError, EngineDeadError):
            self._streams.pop(number, None)
            raise
        if seed != request.params.seed:
            stream.request = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=seed))
        return stream

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """See `Backend.abort`. Does not wait: the stream's last delta confirms it."""
        self._check()
        self._send(messages.Abort(request_id, index))

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._ask(messages.Ask(next(self._numbers), "stats"))
        return stats

    async def reset_prefix_cache(self) -> int:
        pages: int = await self._ask(messages.Ask(next(self._numbers), "reset_prefix_cache"))
        return pages

    # ---- LoRABackend

    async def load_lora(self, name: str, path: str) -> LoadedLoRA:
        """See `LoRABackend`."""
        try:
            loaded: LoadedLoRA = await self._ask(messages.LoadLora(next(self._numbers), name, path))
        except RefusedError as error:
            raise LoRAError(str(error)) from error
        return loaded

    def unload_lora(self, name: str) -> None:
        """See `LoRABackend`."""
        self._check()
        self._send(messages.UnloadLora(name))

    def release_lora(self, ref: LoRARef) -> None:
        """See `LoRABackend`."""
        self._check()
        self._send(messages.ReleaseLora(ref))

    # ---- operations

    async def operate(self, operation: AnyOperation) -> WeightState:
        """Change the engine. Raises `RequestError` or `RefusedError` if it cannot; then nothing has changed."""
        state: WeightState = await self._ask(messages.Operate(next(self._numbers), operation))
        return state

    # ---- other queries

    async def check(self) -> None:
        """Check that all slots and pages are accounted for; a leak is a fault that ends the engine."""
        await self._ask(messages.Ask(next(self._numbers), "check"))

    async def start_profile(self, steps: int) -> None:
        """Start a profile of so many steps. Raises `RefusedError` if there is no folder for traces, or a profile is
        running."""
        await self._ask(messages.StartProfile(next(self._numbers), steps))

    async def wait_profile(self) -> None:
        """Wait until no profile is running."""
        await self._ask(messages.Ask(next(self._numbers), "wait_profile"))

    async def stop_profile(self) -> str:
        """Stop the profile and return the folder with the trace.

        Raises:
            RefusedError: no profile is running.
        """
        folder: str = await self._ask(messages.Ask(next(self._numbers), "stop_profile"))
        return folder

    async def _ask(self, message: messages.Numbered) -> Any:
        self._check()
        self._answers[message.number] = answer = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            return await answer
        finally:
            self._answers.pop(message.number, None)

    def _send(self, message: messages.ToCore) -> None:
        self._outbox.put(messages.encode(message))

    def _check(self) -> None:
        if self._closed is not None:
            raise self._closed.error()

    def _leave(self, stream: DeltaStream) -> None:
        assert isinstance(stream, LinkStream)
        if self._streams.pop(stream.number, None) is not None:
            self._send(messages.Leave(stream.number))

    # ---- incoming messages

    def _take(self, message: messages.FromCore) -> None:
        match message:
            case messages.Deltas():
                self._take_deltas(message)
            case messages.Part():
                if (stream := self._streams.get(message.stream)) is not None:
                    stream.take_part(message)
            case messages.Accepted():
                self._settle(message.number, message.seed)
            case messages.Answer():
                self._settle(message.number, message.value)
            case messages.Operated():
                self._settle(message.number, message.state)
            case messages.Refused():
                self._refuse(message)
            case _:
                self._observe(message)

    def _take_deltas(self, deltas: messages.Deltas) -> None:
        streams, versions = self._streams, ((deltas.version, 1),) if deltas.version else None
        for number, index, token in zip(deltas.streams, deltas.indexes, deltas.tokens, strict=True):
            stream = streams.get(number)
            if stream is not None:  # else its reader has left
                delta = SequenceDelta(stream.request.request_id, index, [token])
                if versions is not None:
                    delta.weight_versions = versions
                stream.take(delta)
        for number, delta in deltas.others:
            stream = streams.get(number)
            if stream is not None:
                stream.take_whole(delta)
                if stream.ended:
                    streams.pop(number, None)  # a listening reader may have left already

    def _settle(self, number: int, value: object) -> None:
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(value)

    def _refuse(self, refused: messages.Refused) -> None:
        answer = self._answers.get(refused.number)
        if answer is not None and not answer.done():
            answer.set_exception(_refusal(refused))


def _refusal(refused: messages.Refused) -> Exception:
    match refused.kind:
        case "queue_full":
            return QueueFullError(refused.reason)
        case "request":
            return RequestError(refused.place, refused.reason)
        case "engine":
            return EngineDeadError(refused.reason)
        case "question":
            return RefusedError(refused.reason)
