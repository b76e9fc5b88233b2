"""Responses to generation requests: one JSON object, or a stream of server-sent events.

The status of a stream cannot change after it has started: later errors are sent as an ``error`` event, and only a
complete stream ends with ``[DONE]``. A client that disconnects aborts its generations, in both forms.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxinfer.serve.api.capacity import Place
from jaxinfer.serve.api.errors import Kind, ServeError, answer_to, rename_fields
from jaxinfer.serve.api.json_bodies import gone_away
from jaxinfer.serve.api.requests import Call, Usage
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.choices import Choice, TextChoice
from jaxinfer.serve.http.errors import error_event
from jaxinfer.text.output import OutputDelta

_AT_ONCE = 8
"""Prompts or outputs of one request that are processed in one iteration of the event loop."""
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


@dataclasses.dataclass(frozen=True)
class Envelope:
    """Response fields around the choices. ``extra``: further top-level fields."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def around(self, choices: Sequence[str], usage: Usage) -> str:
        """Return the JSON of the response; ``choices`` are already JSON because there may be many."""
        head = json.dumps(self._head())[:-1]
        rest = json.dumps({"usage": usage_json(usage), **self.extra})[1:]
        return f'{head}, "choices": [{", ".join(choices)}], {rest}'

    def chunk(self, *, with_usage: bool, extra: bool = False) -> tuple[str, str]:
        """Return the text before and after the choices of a server-sent event."""
        whole = self._head() | (self.extra if extra else {})
        after = '],"usage":null}\n\n' if with_usage else "]}\n\n"
        return f'data: {json.dumps(whole, separators=(",", ":"))[:-1]},"choices":[', after

    def _head(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("id", "object", "created", "model", "system_fingerprint")}


@dataclasses.dataclass
class Reply:
    """A generation and its choices.

    Attributes:
        echoes_logprobs: output is held back until the prompt logprobs to echo are available.
        shown: 0 if no output token is shown, else 1.
    """

    generation: Generation
    choices: Sequence[Choice]
    echoes_logprobs: bool = False
    shown: int = 1
    _waiting: list[OutputDelta] = dataclasses.field(default_factory=list)

    def ready(self, delta: OutputDelta) -> Sequence[OutputDelta]:
        """Return the deltas that can be shown after ``delta`` has arrived."""
        if not self.echoes_logprobs:
            return (delta,)
        self._waiting.append(delta)
        if delta.index != 0 or (delta.prompt_logprobs is None and delta.finish_reason is None):
            return ()
        self.echoes_logprobs = False
        for choice in self.choices:
            if isinstance(choice, TextChoice) and choice.echo is not None:
                choice.echo = dataclasses.replace(choice.echo, logprobs=delta.prompt_logprobs or ())
        waiting, self._waiting = self._waiting, []
        return waiting

    async def collect(self) -> None:
        async for delta in self.generation:
            for each in self.ready(delta):
                self.choices[each.index].take(each)


async def start(frontend: Frontend, calls: Sequence[Call], names: Sequence[Mapping[str, str]]) -> list[Generation]:
    """Start all generations, or none.

    Args:
        names: for each call, the request's field names.

    Raises:
        ServeError: error of the first call that is rejected.
    """

    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(call: Call, its: Mapping[str, str], place: Place | None = None) -> Generation:
        async with turns:
            await asyncio.sleep(0)
            with rename_fields(its):
                return await frontend.generate(call, place)

    if len(calls) == 1:
        return [await one(calls[0], names[0])]
    places, tasks = frontend.reserve(calls), list[asyncio.Task[Generation]]()
    try:
        with frontend.meant(calls[0]) as first:  # all calls use the same adapter, even if it is reloaded meanwhile
            async for call, its, place in in_turn(zip(calls, names, places, strict=True)):
                call = dataclasses.replace(call, lora=first.lora)
                tasks.append(asyncio.ensure_future(one(call, its, place)))
            return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Generation):
                await found.aclose()
        for place in places:  # includes slots of tasks that were cancelled before they started
            place.leave()
        raise


async def while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, which is cancelled if the client disconnects.

    Raises:
        ServeError: CANCELLED: the client disconnected.
    """
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise gone_away()
        return doing.result()
    finally:
        doing.cancel()
        gone.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole(envelope: Envelope, replies: Sequence[Reply]) -> str:
    """Return the complete response as JSON.

    Raises:
        ServeError: one of the generations failed.
    """
    if len(replies) == 1:
        await replies[0].collect()
    else:
        await _all(replies)
    choices = []
    async for choice in in_turn([choice for reply in replies for choice in reply.choices]):
        choices.append(json.dumps(choice.whole()))
    return envelope.around(choices, _total(replies))


async def in_turn[T](items: Iterable[T]) -> AsyncIterator[T]:
    """Yield each of ``items``, and yield to the event loop after every few of them."""
    for rank, item in enumerate(items):
        if rank % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
        yield item


async def _all(replies: Sequence[Reply]) -> None:
    tasks = []
    try:
        async for reply in in_turn(replies):
            tasks.append(asyncio.ensure_future(reply.collect()))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def close(replies: Sequence[Reply]) -> None:
    """Abort the generations that are still running."""
    for reply in replies:
        await reply.generation.aclose()


class ServerSentEvents(Response):
    """A server-sent event stream of generations, which are aborted when the client disconnects. A waiting stream sends
    keep-alives, because proxies and clients close silent connections.

    Args:
        door: gives the keep-alive interval, and counts the error that ends a stream.
    """

    waiting = b": waiting\n\n"
    """Keep-alive: a comment line."""

    def __init__(self, generations: Sequence[Generation], *, headers: Mapping[str, str], door: AppState) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers})
        del self.headers["content-length"]
        self._generations, self._failed, self._seconds = generations, door.failed, door.stream_ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send))
        except ServeError as error:  # only raised if the client disconnects: errors of the stream become events
            self._failed(error)
        finally:
            for generation in self._generations:
                await generation.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with _Pulse(send, self.waiting, self._seconds) as pulse:
                await self._events(pulse.send)
        except Exception as error:  # noqa: BLE001 - the stream has started: every error is sent to the client
            answer = answer_to(error)
            self._failed(answer)
            await put(send, self._broken(answer))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, send: Send) -> None:
        """Send all events."""
        raise NotImplementedError

    def _broken(self, error: ServeError) -> bytes:
        """Return the event that ends an incomplete stream."""
        return error_event(error)


class _Pulse:
    """Sends body chunks, and the keep-alive ``sign`` after every ``seconds`` without one."""

    def __init__(self, send: Send, sign: bytes, seconds: float) -> None:
        self._send, self._sign, self._seconds = send, sign, seconds
        self._sent = False
        self._task: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        self._sent = True
        await self._send(message)

    async def __aenter__(self) -> _Pulse:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            self._sent = False
            await asyncio.sleep(self._seconds)
            if not self._sent:
                await put(self._send, self._sign)


class EventStream(ServerSentEvents):
    """Chunks as server-sent events, one write per delta.

    Args:
        with_usage: send usage in a last chunk, and null in all other chunks.
        headers, door: see `ServerSentEvents`.
    """

    def __init__(
        self,
        envelope: Envelope,
        replies: Sequence[Reply],
        *,
        with_usage: bool,
        headers: dict[str, str],
        door: AppState,
    ) -> None:
        super().__init__([reply.generation for reply in replies], headers=headers, door=door)
        self._envelope, self._replies, self._with_usage = envelope, replies, with_usage
        self._before, self._after = envelope.chunk(with_usage=with_usage)

    async def _events(self, send: Send) -> None:
        opening = "".join(self._openings())
        if opening:
            await put(send, opening.encode())
        before, after, replies = self._before, self._after, self._replies
        async for place, delta in _merged([reply.generation for reply in replies]):
            reply = replies[place]
            events = ""
            for each in reply.ready(delta):
                for choice in reply.choices[each.index].chunks(each):
                    events += f"{before}{choice}{after}"
            if events:
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
        await put(send, (self._last() + "data: [DONE]\n\n").encode())

    def _openings(self) -> list[str]:
        choices = [opening for reply in self._replies for choice in reply.choices if (opening := choice.opening())]
        first, _ = self._envelope.chunk(with_usage=self._with_usage, extra=True)
        heads = [first] + [self._before] * len(choices)
        return [f"{head}{choice}{self._after}" for head, choice in zip(heads, choices, strict=False)]

    def _last(self) -> str:
        if not self._with_usage:
            return ""
        return f'{self._before}],"usage":{json.dumps(usage_json(_total(self._replies)))}}}\n\n'


async def put(send: Send, data: bytes) -> None:
    """Send a body chunk."""
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, OutputDelta]]:
    """Merge the deltas of all generations as they arrive. The first error ends the stream."""
    if len(generations) == 1:
        async for delta in generations[0]:
            yield 0, delta
        return
    news: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None] = asyncio.Queue(len(generations))
    tasks: list[asyncio.Future[None]] = []
    starting = asyncio.ensure_future(_start_pumps(generations, news, tasks))
    try:
        running = len(generations)
        while running:
            item = await news.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in (starting, *tasks):
            task.cancel()
        await asyncio.gather(starting, *tasks, return_exceptions=True)


async def _start_pumps(
    generations: Sequence[Generation],
    news: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None],
    tasks: list[asyncio.Future[None]],
) -> None:
    async for place, each in in_turn(enumerate(generations)):
        tasks.append(asyncio.ensure_future(_pump(place, each, news)))


async def _pump(
    place: int, generation: Generation, news: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None]
) -> None:
    """Put deltas into the bounded queue; a generation merges the deltas that are not fetched."""
    try:
        async for delta in generation:
            await news.put((place, delta))
    except ServeError as error:
        await news.put(error)
    else:
        await news.put(None)


def _total(replies: Sequence[Reply]) -> Usage:
    """Return the usage of all replies, counting only tokens that the client sees."""
    usages = [(reply.generation.usage, reply.shown) for reply in replies]
    counted = [count for reply in replies for each in reply.choices if (count := each.reasoning_tokens) is not None]
    return Usage(
        prompt=sum(usage.prompt for usage, _ in usages),
        completion=sum(usage.completion * shown for usage, shown in usages),
        cached=sum(usage.cached for usage, _ in usages),
        reasoning=None if not counted else sum(counted),
    )


def usage_json(usage: Usage) -> dict[str, Any]:
    reasoning = {} if usage.reasoning is None else {"completion_tokens_details": {"reasoning_tokens": usage.reasoning}}
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        **reasoning,
    }


def timeout_of(header: str | None) -> float | None:
    """Return the client's timeout in seconds, from the header X-Request-Timeout.

    Raises:
        ServeError: INVALID: not a finite number.
    """
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        message = f"X-Request-Timeout={header[:40]!r} must be a number of seconds"
        raise ServeError(Kind.INVALID, message, "X-Request-Timeout")
    return seconds
