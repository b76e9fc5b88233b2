"""Engine that emits tokens on schedule, and records the time at which each token left it.

The scheduler and the page allocator are the real ones; there is no device. Both sides of a run see the same `Stamps`:
the time from a token's stamp to its arrival at the client is the latency of everything in between. No jax.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import time
from typing import Literal

import numpy as np

from benchmarks.traces.fake import resolved
from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineLoop, new_kv
from jaxinfer.engine.scheduling.plan import StepPlan, StepResult
from jaxinfer.types import SequenceDelta


@dataclasses.dataclass(frozen=True)
class Pace:
    """Schedule of tokens.

    Attributes:
        step_seconds: time of a step, in which each running sequence gets a token.
        groups: groups of sequences whose tokens leave together, at even distances within a step: 1 is an engine
            that steps all sequences at once.
        token: the id of every token.
    """

    step_seconds: float
    groups: int
    token: int


class Stamps:
    """Times at which tokens left the engine: a file that two processes map. They share the clock, CLOCK_MONOTONIC.

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


class InstantRunner:
    """Model runner that executes plans at once: every row samples the same token.

    Attributes:
        decodes: whether the last plan had decode rows.
    """

    def __init__(self, token: int) -> None:
        self.decodes, self._token = False, token

    def launch(self, plan: StepPlan) -> StepPlan | None:
        self.decodes = bool(plan.decodes)
        return plan or None

    def read(self, launched: StepPlan | None) -> StepResult | None:
        if launched is None:
            return None
        rows = len(launched.decodes)
        tokens = [[self._token] * launched.steps for _ in range(rows)]
        return StepResult(launched, tokens, [()] * rows, [[] for _ in launched.prefills])


class PacedEngine(EngineLoop):
    """The real engine loop, with tokens that leave it on schedule."""

    def __init__(self, config: EngineConfig, context: int, pace: Pace, stamps: Stamps) -> None:
        engine = dataclasses.replace(resolved(config, context), async_scheduling=False)
        self._instant = InstantRunner(pace.token)
        super().__init__(engine, new_kv(engine), self._instant)
        self._pace, self._stamps = pace, stamps
        self._groups: collections.deque[list[SequenceDelta]] = collections.deque()  # of the last step, not yet emitted
        self._due = 0.0

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._groups)

    def step(self) -> list[SequenceDelta]:
        """Return the next group of tokens, when it is due. Steps that only prefill take no time."""
        if not self._groups:
            deltas = super().step()
            if not self._instant.decodes:
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
        """Sleep until ``seconds`` after the previous group; an engine that is late does not hurry to catch up."""
        now = time.monotonic()
        self._due = max(self._due + seconds, now)
        time.sleep(self._due - now)
