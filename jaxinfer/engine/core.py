"""Engine core: its protocol, and its loop around the scheduler, the KV manager and a plan runner. No jax."""

from __future__ import annotations

import collections
import dataclasses
import enum
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.images import PlaceAxes
from jaxinfer.engine.scheduling.pages import Costs
from jaxinfer.engine.scheduling.plan import PlanRunner
from jaxinfer.engine.scheduling.queues import Queued
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.engine.scheduling.usage import BusyTime, Usage
from jaxinfer.engine.step_trace import StepTrace
from jaxinfer.kv.journal import Journal
from jaxinfer.kv.manager import KVConfig, KVManager
from jaxinfer.lora.store import LoRAStore
from jaxinfer.sampling_params import RequestError, SamplingLimits
from jaxinfer.spec import Bounded, make_drafter
from jaxinfer.structured.masks import Masks
from jaxinfer.structured.matcher import Vocabulary
from jaxinfer.types import FinishReason, Request, SequenceDelta

PauseMode = Literal["wait", "keep", "abort"]


class Pace(enum.Enum):
    """State of an engine: it admits and computes; ends the requests that have begun; or computes nothing."""

    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


@runtime_checkable
class EngineMemory(Protocol):
    """Protocol of what has weights and pools on devices: an engine, or the part of one in another process.

    Attributes:
        shares_weights: others have references to arrays of the weights, and may delete them.
    """

    shares_weights: bool

    @property
    def weight_version(self) -> int:
        """Version of the served weights; 0: those that it was started with."""

    @property
    def pace(self) -> Pace:
        """Whether it runs, drains or is paused. While it drains or is paused, `EngineCore.add` only queues."""

    def pause(self, mode: PauseMode = "wait") -> None:
        """Stop after the steps in flight ("keep"), when all begun requests have ended ("wait": it drains first), or
        after aborting all requests ("abort")."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def swap(self, weights: Sequence[Any], version: int, *, restart: bool = True) -> None:
        """Replace weights between two steps by those that `stage` has placed. Sequences go on with their tokens, whose
        keys and values are computed again.

        Args:
            restart: false: the weights change no keys and values: nothing is computed again.
        """

    def stage(self, model: Any, *, drafts: bool = False) -> Any:
        """Place some parameters of the model (`jaxinfer.models.model.Model`), or of its draft model, on the devices, in
        the form that programs take, next to the served ones. From any thread."""

    def sleep(self, *, cache: bool, weights: bool) -> None:
        """Free the memory of the KV cache, of the weights, or of both. The engine must be paused."""

    def wake(self) -> None:
        """Make an empty KV cache. Weights come from `stage` and `swap`."""


@runtime_checkable
class EngineCore(EngineMemory, Protocol):
    """Protocol of continuous batching engines for token-id requests: an engine, replicas, or data-parallel attention.

    Attributes:
        config: resolved settings; with replicas the settings of each.
        limits: sampler limits for requests.
        loras: adapters that requests may name; None: no adapters are served.
    """

    config: ResolvedEngine
    loras: LoRAStore | None

    @property
    def limits(self) -> SamplingLimits: ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def add(self, request: Request) -> Request:
        """Queue a validated request; returns it with its seed resolved.

        Raises:
            RequestError: its id is in use, or it can never fit.
            QueueFullError: the waiting queue is full.
        """

    def check_capacity(self, request: Request, ahead: int = 0) -> None:
        """Raise QueueFullError where `add` would; see `Scheduler.check_capacity`. From any thread."""

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request (or one of its samples) without another delta. ``reason``: finish reason in the statistics."""

    def step(self) -> list[SequenceDelta]:
        """Launch the next step, then read an earlier one: the device never waits for the host."""

    def stats(self) -> EngineStats:
        """Return statistics: current running, waiting and usage figures, and counters since the start."""

    def usage(self) -> Usage:
        """Return memory and time of the devices. From any thread."""

    def temporaries(self) -> int:
        """Return the bytes of device memory that the program with the largest working set uses while it runs."""

    def served_programs(self) -> Any:
        """Return the programs of one replica, for `Model.logprobs`: `jaxinfer.engine.execution.on_policy`."""

    def reset_prefix_cache(self) -> int:
        """Drop every cached page; return their number. Running sequences keep theirs, which no other can match."""

    def journals(self) -> list[Journal]:
        """Start recording changes of cached pages, one journal per replica; to be called before any request."""

    def check(self) -> None:
        """Raise AssertionError unless all slots and pages are accounted for."""


class EngineLoop:
    """An `EngineCore` (see there) around a runner: plans a step, launches it, reads an earlier one, commits it.

    Args:
        kv: an empty manager.
        runner: executes the plans.
        size_classes: prefill sizes with bitwise identical results, see `buckets.next_chunk`; None: one class per size.
        decode_agrees: decode rows and prefill chunks write bitwise identical keys and values.
        vocab_size: upper bound of draft token ids.
        costs: costs for the choice between swapping and recomputing a preempted sequence.
        vocabulary: vocabulary for grammars; None: requests have none.
        loras: adapters that requests may name; None: requests have none.
        axes: rotary positions on three axes of prompts with images; None: the model has one.
    """

    def __init__(
        self,
        config: ResolvedEngine,
        kv: KVManager,
        runner: PlanRunner,
        *,
        limits: SamplingLimits | None = None,
        size_classes: Mapping[int, int] | None = None,
        decode_agrees: bool = False,
        vocab_size: int = 2**31 - 1,
        costs: Costs | None = None,
        clock: Callable[[], float] = time.monotonic,
        vocabulary: Callable[[], Vocabulary] | None = None,
        loras: LoRAStore | None = None,
        axes: PlaceAxes | None = None,
    ) -> None:
        self.config, self._kv, self.loras = config, kv, loras
        self._runner = runner if config.trace_steps is None else StepTrace(config.trace_steps, runner)
        self.limits = limits or SamplingLimits(
            max_logprobs=config.top_logprobs, drafts=config.guesses, masks=config.grammars
        )
        classes = size_classes or {size: number for number, size in enumerate(config.prefill_sizes)}
        drafter = make_drafter(config)
        bounded = drafter if drafter is None or config.drafts_on_device else Bounded(drafter, vocab_size)
        ahead = 0 if config.speculative is None else config.num_speculative_tokens
        masks = Masks(vocabulary if config.grammars else None, config.structured_output_helpers, ahead)
        more: dict[str, Any] = {"masks": masks, "loras": loras, "decode_agrees": decode_agrees, "axes": axes}
        self._scheduler = Scheduler(config, kv, classes, drafter=bounded, costs=costs, clock=clock, **more)
        self._pending: collections.deque[Any] = collections.deque()  # launched steps that are not read yet
        self._ahead = config.microbatches if config.async_scheduling else 0
        self._last_read, self.busy = time.monotonic(), BusyTime()
        self._new_seed = seed_source(config)
        self.pace, self.weight_version, self.shares_weights = Pace.RUNNING, 0, False
        self._settled: list[SequenceDelta] = []  # deltas of steps that `settle` has read

    @property
    def has_work(self) -> bool:
        works = self._scheduler.has_ended if self.pace is Pace.PAUSED else self._scheduler.has_work
        return works or bool(self._pending or self._settled)

    def add(self, request: Request) -> Request:
        if request.params.return_routed_experts and not self.limits.experts:
            why = "is not served: the model has no experts, or pipeline stages"
            raise RequestError("return_routed_experts", why)
        request = seeded(request, self._new_seed)
        self._scheduler.add(request)
        return request

    def check_capacity(self, request: Request, ahead: int = 0) -> None:
        self._scheduler.check_capacity(request, ahead)

    @property
    def alive(self) -> int:
        """Waiting and running sequences."""
        return self._scheduler.running + sum(self._scheduler.waiting.values())

    @property
    def queued(self) -> Queued:
        """Counts of the waiting queue. From any thread."""
        return self._scheduler.queued

    def cached(self, request: Request) -> int:
        """Return how many prompt tokens would hit the prefix cache now."""
        return self._scheduler.cached(request)

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        self._scheduler.abort(request_id, index, reason)

    def step(self) -> list[SequenceDelta]:
        return self.read(self.launch())

    def launch(self) -> bool:
        """Plan the next step and launch it; return whether there was anything to do."""
        if self.pace is Pace.PAUSED:
            return False
        plan = self._scheduler.plan()
        self.busy.begin()
        launched = self._runner.launch(plan)
        if launched is not None:
            self._pending.append(launched)
            return True
        self.busy.end()
        if not self._pending:
            self._scheduler.rest()
        return False

    def read(self, launched: bool) -> list[SequenceDelta]:
        """Return the results of the oldest step, if due: as many steps may be in flight as there are pipeline stages,
        each in another stage; all are read when nothing more was ``launched``."""
        due = self._pending and (not launched or len(self._pending) > self._ahead)
        before = self._pending.popleft() if due else None
        deltas = self._scheduler.commit(self._runner.read(before))
        now, since = time.monotonic(), self._last_read
        self._last_read = now
        if before is not None:
            self.busy.end()
            self._scheduler.stats.step(now - since)
        if self.weight_version:
            for delta in deltas:
                delta.weight_versions = ((self.weight_version, len(delta.token_ids)),)
        if self.pace is Pace.DRAINING and self._scheduler.drained:
            self.pause("keep")
        if self._settled:
            deltas, self._settled = _joined([*self._settled, *deltas]), []
        return deltas

    # ---- pauses and new weights

    def pause(self, mode: PauseMode = "wait") -> None:
        if mode == "wait":
            self._scheduler.drain()
            self.pace = Pace.PAUSED if self._scheduler.drained else Pace.DRAINING
        else:
            self._scheduler.resume()  # drains no longer
            self.pace = Pace.PAUSED
        if mode == "abort":
            self._scheduler.abort_all()

    def resume(self) -> None:
        self._scheduler.resume()
        self.pace = Pace.RUNNING

    def settle(self) -> None:
        """Read the steps in flight; the next step returns their deltas."""
        while self._pending:
            self._settled = self.read(False)

    def stage(self, model: Any, *, drafts: bool = False) -> Any:
        """Do nothing: this engine has no devices."""

    def swap(self, weights: Sequence[Any], version: int, *, restart: bool = True) -> None:
        self.settle()
        self.renew(version, restart=restart)

    def sleep(self, *, cache: bool, weights: bool) -> None:
        self.doze()

    def wake(self) -> None:
        """Do nothing: this engine has no devices."""

    def renew(self, version: int, *, restart: bool) -> None:
        """Count a new version of weights, and compute everything again if ``restart``. No step may be in flight."""
        if restart:
            self._scheduler.restart()
        self.weight_version = version

    def doze(self) -> None:
        """Forget what the KV cache has. The engine must be paused."""
        if self.pace is not Pace.PAUSED:
            raise AssertionError(f"the engine is {self.pace.value}, and must be paused")
        self.settle()
        self._scheduler.restart()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return scheduler.stats.snapshot(
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv=self._kv.usage(),
            loras=scheduler.lora_usage(),
            compilations=self._compilations(),
        )

    def _compilations(self) -> int:
        """Return the number of programs compiled since READY."""
        return 0

    def usage(self) -> Usage:
        """Return no devices: this engine has none."""
        return Usage().timed(self.busy.busy, self.busy.seconds)

    def temporaries(self) -> int:
        return 0

    def served_programs(self) -> Any:
        return None

    def reset_prefix_cache(self) -> int:
        return self._scheduler.reset_prefix_cache()

    def journals(self) -> list[Journal]:
        return [self._kv.start_journal()]

    def check(self) -> None:
        self._scheduler.check()


def _joined(deltas: list[SequenceDelta]) -> list[SequenceDelta]:
    """Return one delta for each sample."""
    found: dict[tuple[str, int], SequenceDelta] = {}
    for delta in deltas:
        key = delta.request_id, delta.index
        found[key] = found[key].extended(delta) if key in found else delta
    return list(found.values())


def seed_source(config: ResolvedEngine) -> Callable[[], int]:
    """Return a function that draws seeds for requests without one."""
    drawn = np.random.default_rng(config.seed if config.seed is not None else secrets.randbits(64))
    return lambda: int(drawn.integers(2**63))


def seeded(request: Request, new_seed: Callable[[], int]) -> Request:
    """Return the request with its seed resolved."""
    if request.params.seed is not None:
        return request
    return dataclasses.replace(request, params=dataclasses.replace(request.params, seed=new_seed()))


def new_kv(engine: ResolvedEngine, windows: tuple[int | None, ...] = (None,)) -> KVManager:
    """Make the KV manager of an engine. ``windows``: windows of the cache groups."""
    return KVManager(
        KVConfig(
            pages=engine.num_pages,
            page_size=engine.page_size,
            slots=engine.rows + engine.branches,
            width=engine.table_width,
            windows=windows,
            states=engine.num_states,
            host_pages=engine.host_pages,
            prefix_caching=engine.enable_prefix_caching,
        )
    )
