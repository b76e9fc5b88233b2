"""Load on a server: open loop, where requests are sent when due, or closed loop, where each user waits for an answer
before the next request."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jaxinfer.bench.record import Record
from jaxinfer.bench.target import Ending, Item, SendFailed, Target

INTERRUPTED = "interrupted"
TICK = 1e-9  # seconds: shorter waits are below clock resolution


class Prepared(NamedTuple):
    """An encoded request with its due time in seconds since the run began."""

    item: Item
    message: bytes
    due: float


class Driver:
    """Load of a single run. ``records`` has every request from its sending on, so that interrupted runs keep results.

    Args:
        clock: seconds; the clock of the event loop.
        timeout: seconds from sending to the end of the stream, after which a request has failed.
        on_end: called with the record of each request that has ended.
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
        """Send each request when it is due, independently of the others. ``prepared`` is in order of due times."""
        self._begin()
        async with asyncio.TaskGroup() as group:
            for each in prepared:
                while (wait := each.due - self.now()) > TICK:
                    await asyncio.sleep(wait)
                group.create_task(self._send(each))

    async def closed_loop(self, items: Iterator[Item], users: int, duration: float | None = None) -> None:
        """Keep ``users`` requests in flight, until ``items`` end, or with no new ones after ``duration`` seconds."""
        self._begin()
        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(self._user(items, duration))

    async def _user(self, items: Iterator[Item], duration: float | None) -> None:
        while duration is None or self.now() < duration:
            item = next(items, None)
            if item is None:
                return
            message = self._target.prepare(item)  # before its due time: users of this loop send immediately
            await self._send(Prepared(item, message, self.now()))

    def _begin(self) -> None:
        gc.collect()
        gc.freeze()  # the collector skips objects that outlive the run
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
