"""Putting load on a server: in open loop, where requests come when they come, or in closed loop, where each user
waits for an answer before asking again."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jaxinfer.bench.record import Record
from jaxinfer.bench.target import Ending, Item, SendFailed, Target

INTERRUPTED = "interrupted"
TICK = 1e-9  # seconds: less than a clock can tell is no reason to sleep


class Prepared(NamedTuple):
    """A request as it will be sent, and when: seconds since the run began."""

    item: Item
    message: bytes
    due: float


class Driver:
    """One run. ``records`` are there from the moment a request is sent, so that a run that is cut short is not lost.

    Args:
        clock: seconds; the event loop's own.
        timeout: seconds from sending to the stream's end, after which a request has failed.
        on_end: told of each request that has ended.
    """

    def __init__(
        self,
        target: Target,
        clock: Callable[[], float],
        timeout: float,
        on_end: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self.records: list[Record] = []
        self._target, self._clock, self._timeout, self._on_end = target, clock, timeout, on_end
        self._start = clock()

    def now(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._start

    async def open_loop(self, prepared: Iterable[Prepared]) -> None:
        """Send each when it is due, whatever has become of the others. They are in order."""
        self._begin()
        async with asyncio.TaskGroup() as group:
            for each in prepared:
                while (wait := each.due - self.now()) > TICK:
                    await asyncio.sleep(wait)
                group.create_task(self._send(each))

    async def closed_loop(self, items: Iterator[Item], users: int, duration: float | None = None) -> None:
        """``users`` requests under way, until ``items`` end, or none is begun any more after ``duration`` seconds."""
        self._begin()
        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(self._user(items, duration))

    async def _user(self, items: Iterator[Item], duration: float | None) -> None:
        while duration is None or self.now() < duration:
            item = next(items, None)
            if item is None:
                return
            message = self._target.prepare(item)  # before it is due: the users of this loop need no time to type
            await self._send(Prepared(item, message, self.now()))

    def _begin(self) -> None:
        gc.collect()
        gc.freeze()  # what lives through the run is not looked at in it
        self._start = self._clock()

    async def _send(self, request: Prepared) -> None:
        item = request.item
        record = Record(len(self.records), request.due, self.now(), item.prompt_len, item.output_len)
        self.records.append(record)
        try:
            async with asyncio.timeout(self._timeout):
                ending = await self._target.stream(request.message, lambda tokens: record.note(self.now(), tokens))
        except TimeoutError:
            _failed(record, "timeout", f"no end after {self._timeout:g} s")
        except SendFailed as cause:
            _failed(record, cause.kind, str(cause))
        except asyncio.CancelledError:
            _failed(record, INTERRUPTED, "the run was cut short")
            raise
        else:
            _ended(record, ending)
        finally:
            record.ended = self.now()
            self._on_end(record)


def _failed(record: Record, kind: str, message: str) -> None:
    record.error_kind, record.error = kind, message
    record.output_tokens = sum(record.counts)


def _ended(record: Record, ending: Ending) -> None:
    record.finish = ending.finish
    record.prompt_tokens = record.asked_prompt if ending.prompt_tokens is None else ending.prompt_tokens
    record.estimated = ending.output_tokens is None
    record.output_tokens = sum(record.counts) if ending.output_tokens is None else ending.output_tokens
    record.cached_tokens = ending.cached_tokens or 0
