"""Engine without a device: the real scheduler and page allocator, made-up tokens, time by a formula."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from benchmarks.traces.probe import counters, occupancy
from benchmarks.traces.replay import Counters, Occupancy
from jaxinfer.config import EngineConfig, ResolvedEngine, resolve
from jaxinfer.engine.core import new_kv
from jaxinfer.engine.scheduling.plan import StepPlan, StepResult
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.types import CacheSpec, LayerSpec, Request, SequenceDelta


@dataclasses.dataclass(frozen=True)
class Pace:
    """Simulated seconds of a step with decode rows, and of a prompt token."""

    decode_step: float = 0.02
    prompt_token: float = 1e-4

    def of(self, plan: StepPlan) -> float:
        tokens = sum(prefill.chunk.size for prefill in plan.prefills)
        return self.decode_step * bool(plan.decodes) * plan.steps + self.prompt_token * tokens


# KV cache of a model of 8B parameters: it decides how many pages the swap space has.
_CACHE = CacheSpec((LayerSpec(),) * 32, kv_heads=8, head_dim=128)


def resolved(config: EngineConfig, max_position: int) -> ResolvedEngine:
    """Resolve ``config`` without a device: the pool has the requested size, or enough pages for every slot."""
    config = dataclasses.replace(config, kv_cache_bytes=1 << 60)
    return resolve(config, _CACHE, max_position=max_position, itemsize=2)


class FakeServer:
    """Engine loop without a device: each step is planned before the previous step is committed.

    Attributes:
        plan_seconds, commit_seconds: real time of the scheduler, step by step.
        cpu_seconds: processor time of both together, which is independent of other programs.
        scheduler, kv: exposed for inspection.
    """

    def __init__(self, engine: ResolvedEngine, pace: Pace = Pace()) -> None:
        self.kv = new_kv(engine)
        # Each prefill size is a numerics class of its own: the most conservative result that a probe can have.
        classes = {size: number for number, size in enumerate(engine.prefill_sizes)}
        self.scheduler: Scheduler = Scheduler(engine, self.kv, classes, clock=self.now)
        self.plan_seconds: list[float] = []
        self.commit_seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._pace, self._simulated = pace, 0.0
        self._pending: StepPlan | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._pending is not None

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self) -> Sequence[SequenceDelta]:
        pending = self._pending
        result = None if pending is None else _made_up(pending)
        cpu, start = time.thread_time(), time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        deltas = self.scheduler.commit(result)
        self.commit_seconds.append(time.perf_counter() - planned)
        self.cpu_seconds.append(time.thread_time() - cpu)
        self.plan_seconds.append(planned - start)
        self._simulated += 0.0 if pending is None else self._pace.of(pending)  # reading waits for the step
        self._pending = plan or None
        return deltas

    def now(self) -> float:
        return self._simulated

    def wait(self, seconds: float) -> None:
        self._simulated += seconds

    def counters(self) -> Counters:
        return counters(self.scheduler.stats.snapshot())

    def occupancy(self) -> Occupancy:
        return occupancy(self.scheduler)


def _made_up(plan: StepPlan) -> StepResult:
    rows = len(plan.decodes)
    return StepResult(plan, [[0] * plan.steps for _ in range(rows)], [()] * rows, [[] for _ in plan.prefills])
