"""An engine without a device: the real scheduler and the real pages, tokens out of thin air, time by a formula."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from benchmarks.traces.replay import Counters, Occupancy
from jaxinfer.config import EngineConfig, ResolvedEngine, resolve
from jaxinfer.engine.plan import StepPlan, StepResult
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.kv.manager import KVConfig, KVManager
from jaxinfer.types import CacheSpec, LayerSpec, Request, SequenceDelta


@dataclasses.dataclass(frozen=True)
class Pace:
    """Simulated seconds: of a step with decode rows, and of a prompt token."""

    decode_step: float = 0.02
    prompt_token: float = 1e-4

    def of(self, plan: StepPlan) -> float:
        tokens = sum(prefill.chunk.size for prefill in plan.prefills)
        return self.decode_step * bool(plan.decodes) * plan.steps + self.prompt_token * tokens


def resolved(config: EngineConfig, max_position: int) -> ResolvedEngine:
    """What ``config`` means for a model of one layer with full attention."""
    return resolve(config, CacheSpec((LayerSpec(),), 1, 1), max_position=max_position, itemsize=4)


class FakeServer:
    """The engine's loop around nothing: each step is planned before the one before it is committed.

    Attributes:
        host_seconds: real time that planning and committing took, step by step.
        scheduler, kv: for those who want to look inside.
    """

    def __init__(self, engine: ResolvedEngine, pace: Pace = Pace()) -> None:
        config = KVConfig(
            pages=engine.num_pages,
            page_size=engine.page_size,
            slots=engine.max_num_seqs,
            width=engine.table_width,
            host_pages=engine.host_pages,
            prefix_caching=engine.enable_prefix_caching,
        )
        self.kv = KVManager(config)
        # Each prefill size a class of its own: the most cautious answer that a device can give.
        classes = {size: number for number, size in enumerate(engine.prefill_sizes)}
        self.scheduler = Scheduler(engine, self.kv, classes, clock=self.now)
        self.host_seconds: list[float] = []
        self._pace, self._simulated = pace, 0.0
        self._pending: StepPlan | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._pending is not None

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self) -> Sequence[SequenceDelta]:
        result = None if self._pending is None else _made_up(self._pending)
        start = time.perf_counter()
        plan = self.scheduler.plan()
        deltas = self.scheduler.commit(result)
        self.host_seconds.append(time.perf_counter() - start)
        self._simulated += self._pace.of(plan)
        self._pending = plan or None
        return deltas

    def now(self) -> float:
        return self._simulated

    def wait(self, seconds: float) -> None:
        self._simulated += seconds

    def counters(self) -> Counters:
        return counters(self.scheduler)

    def occupancy(self) -> Occupancy:
        return occupancy(self.scheduler)


def _made_up(plan: StepPlan) -> StepResult:
    tokens, none = [0] * plan.steps, [None] * plan.steps
    return StepResult(plan, [tokens] * len(plan.decodes), [none] * len(plan.decodes), [[] for _ in plan.prefills])
