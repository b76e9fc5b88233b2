"""An engine whose tokens come when they are due, and which writes down when each of them left it.

The scheduler and the pages are the real ones; there is no device. Both sides of a run see the same `Stamps`: the time
from a token's stamp to its arrival at the client is what everything between them took. No jax.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import time
from typing import Literal

import numpy as np

from benchmarks.traces.fake import resolved
from jaxinfer.config import EngineConfig
from jaxinfer.engine.scheduling.plan import StepPlan, StepResult
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.kv.manager import KVConfig, KVManager
from jaxinfer.types import Request, SequenceDelta


@dataclasses.dataclass(frozen=True)
class Pace:
    """How tokens come.

    Attributes:
        step_seconds: in which each running sequence gets a token.
        groups: in which a step's tokens leave, at even distances, the same sequences together each time: 1 is an engine
            that steps all of them at once.
        token: the id of every token.
    """

    step_seconds: float
    groups: int
    token: int


class Stamps:
    """When tokens left the engine: a file that two processes map. The clock is CLOCK_MONOTONIC, which they share.

    Args:
        rows, tokens: the table's size; a request's row is the number at the end of its id ("load-7").
    """

    def __init__(self, path: pathlib.Path, rows: int, tokens: int) -> None:
        mode: Literal["r+", "w+"] = "r+" if path.exists() else "w+"
        self.times: np.ndarray = np.memmap(path, np.float64, mode, shape=(rows, tokens))
        self._next: dict[str, int] = collections.defaultdict(int)

    def put(self, deltas: list[SequenceDelta], now: float) -> None:
        times, next_token = self.times, self._next
        for delta in deltas:
            first = next_token[delta.request_id]
            next_token[delta.request_id] = end = first + len(delta.token_ids)
            times[row_of(delta.request_id), first:end] = now
            if delta.finish_reason is not None:
                del next_token[delta.request_id]


def id_of(row: int) -> str:
    return f"load-{row}"


def row_of(request_id: str) -> int:
    return int(request_id.rpartition("-")[2])


class PacedEngine:
    """Satisfies `jaxinfer.engine.async_engine.Steps`."""

    def __init__(self, config: EngineConfig, context: int, pace: Pace, stamps: Stamps) -> None:
        self.config = engine = resolved(config, context)
        self._kv = KVManager(
            KVConfig(
                pages=engine.num_pages,
                page_size=engine.page_size,
                slots=engine.max_num_seqs,
                width=engine.table_width,
                host_pages=engine.host_pages,
                prefix_caching=engine.enable_prefix_caching,
            )
        )
        self._scheduler = Scheduler(engine, self._kv, {size: place for place, size in enumerate(engine.prefill_sizes)})
        self._pace, self._stamps = pace, stamps
        self._groups: collections.deque[list[SequenceDelta]] = collections.deque()  # of the last step, still to leave
        self._due = 0.0
        self._seeds = itertools.count()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._groups)

    def add(self, request: Request) -> Request:
        if request.params.seed is None:
            request = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=next(self._seeds)))
        self._scheduler.add(request)
        return request

    def check_room(self, request: Request, ahead: int = 0) -> None:
        self._scheduler.check_room(request, ahead)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._scheduler.abort(request_id, index)

    def step(self) -> list[SequenceDelta]:
        """The next group of tokens, when it is due. What computes prompts alone takes no time."""
        if not self._groups:
            plan = self._scheduler.plan()
            deltas = self._scheduler.commit(_made_up(plan, self._pace.token))
            if not plan.decodes:
                return deltas
            self._groups.extend(self._split(deltas))
        self._wait(self._pace.step_seconds / self._pace.groups)
        group = self._groups.popleft()
        self._stamps.put(group, time.monotonic())
        return group

    def _split(self, deltas: list[SequenceDelta]) -> list[list[SequenceDelta]]:
        groups: list[list[SequenceDelta]] = [[] for _ in range(self._pace.groups)]
        for delta in deltas:
            groups[row_of(delta.request_id) % self._pace.groups].append(delta)
        return groups

    def _wait(self, seconds: float) -> None:
        """Until ``seconds`` after the group before; an engine that is late does not hurry to catch up."""
        now = time.monotonic()
        self._due = max(self._due + seconds, now)
        time.sleep(self._due - now)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return scheduler.stats.snapshot(
            running=scheduler.running, waiting=scheduler.waiting, kv=self._kv.usage(), compilations=0
        )

    def reset_prefix_cache(self) -> int:
        return self._kv.reset_prefix_cache()

    def check(self) -> None:
        self._scheduler.check()


def _made_up(plan: StepPlan, token: int) -> StepResult:
    rows = len(plan.decodes)
    return StepResult(plan, [[token] * plan.steps for _ in range(rows)], [()] * rows, [[] for _ in plan.prefills])
