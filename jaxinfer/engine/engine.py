"""The engine: requests in, deltas out, one step at a time."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import secrets
import time
import weakref

import numpy as np
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, ResolvedEngine
from jaxinfer.engine.execution.compilations import count_compilations
from jaxinfer.engine.execution.compiled import CompileProgress
from jaxinfer.engine.execution.executor import Executor, MakeExecutor
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.engine.execution.runner import Launched, Proved, Runner
from jaxinfer.engine.scheduling.queues import Queued
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.kv.manager import KVConfig, KVManager
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import mesh_for
from jaxinfer.spec import Drafter, NgramDrafter
from jaxinfer.types import Request, SequenceDelta


class Engine:
    """Continuous batching of token-id requests on one model.

    Everything is compiled in the constructor; a request compiles nothing.

    Args:
        progress: called at the beginning and after each compilation.
        mesh: the devices that it runs on; None: the first ones.
        make_executor: makes another one than `Executor`.
        proved: of the executor's programs, where another engine found it out.

    Raises:
        EngineConfigError: a setting cannot be served.
        ValueError: the mesh has more than one place along ``data`` (see `jaxinfer.engine.distributed.replicas`).
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        platform: str,
        progress: CompileProgress | None = None,
        mesh: Mesh | None = None,
        make_executor: MakeExecutor = Executor,
        proved: Proved | None = None,
    ) -> None:
        mesh = mesh or mesh_for(config)
        if mesh.shape["data"] != 1:
            raise ValueError("an engine runs on one replica: jaxinfer.engine.distributed.replicas makes several")
        model, self.config, self.limits = prepare(model, config, platform, mesh)
        self._kv = _new_kv(model, self.config)
        self._executor = make_executor(model, self.config, self.limits, mesh, progress)
        vocab, itemsize = model.config.vocab_size, model.dtype.itemsize
        self._runner = Runner(
            self._executor, self.config, self.limits, self._kv.tables, vocab, model.cache_spec, itemsize, proved
        )
        self.proved = proved = self._runner.proved
        if not proved.resumes:
            self._kv.stop_caching()  # a prompt that goes on within a piece would have other bits
        self._scheduler = Scheduler(
            dataclasses.replace(self.config, multi_step=proved.multi_step),
            self._kv,
            proved.classes,
            drafter=_drafter(self.config),
            costs=proved.costs,
        )
        self._pending: collections.deque[Launched] = collections.deque()
        self._ahead = self.config.microbatches if self.config.async_scheduling else 0
        self._last_read = time.monotonic()
        seed = self.config.seed
        self._seeds = np.random.default_rng(seed if seed is not None else secrets.randbits(64))
        ready = contextlib.ExitStack()
        self._compiled = ready.enter_context(count_compilations())
        weakref.finalize(self, ready.close)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._pending)

    def add(self, request: Request) -> Request:
        """Queue a validated request; returns it with its seed resolved.

        Raises:
            RequestError: its id is in use, or it can never fit.
            QueueFullError: too much is waiting.
        """
        if request.params.seed is None:
            seed = int(self._seeds.integers(2**63))
            request = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=seed))
        self._scheduler.add(request)
        return request

    def check_room(self, request: Request, ahead: int = 0) -> None:
        """What `add` would say of the queue; see `Scheduler.check_room`. From any thread, also while a step runs.

        Raises:
            QueueFullError: too much is waiting.
        """
        self._scheduler.check_room(request, ahead)

    @property
    def alive(self) -> int:
        """Sequences that wait or run."""
        return self._scheduler.running + sum(self._scheduler.waiting.values())

    @property
    def queued(self) -> Queued:
        """What waits. From any thread."""
        return self._scheduler.queued

    def cached(self, request: Request) -> int:
        """Tokens of a prompt that would be found in the prefix cache now."""
        return self._scheduler.cached(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one of its samples) without another delta."""
        self._scheduler.abort(request_id, index)

    def step(self) -> list[SequenceDelta]:
        """Launch the next step, then read an earlier one: the device never waits for the host."""
        return self.read(self.launch())

    def launch(self) -> bool:
        """Plan the next step and send it on its way; whether there was anything to do."""
        launched = self._runner.launch(self._scheduler.plan())
        if launched is not None:
            self._pending.append(launched)
        return launched is not None

    def read(self, launched: bool) -> list[SequenceDelta]:
        """The results of the oldest step, if it is due: as many may be on their way as there are pipeline stages, each
        in another one, and all are read when nothing more was ``launched``."""
        due = self._pending and (not launched or len(self._pending) > self._ahead)
        before = self._pending.popleft() if due else None
        deltas = self._scheduler.commit(self._runner.read(before))
        self._time_step(before)
        return deltas

    def _time_step(self, read: Launched | None) -> None:
        now = time.monotonic()
        if read is not None:
            self._scheduler.stats.step(now - self._last_read)
        self._last_read = now

    def stats(self) -> EngineStats:
        """What runs, waits and is held now, and what was counted since the start."""
        scheduler = self._scheduler
        return scheduler.stats.snapshot(
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv=self._kv.usage(),
            compilations=self._compiled.count,
        )

    def temporaries(self) -> int:
        """Bytes of device memory that the hungriest program uses while it runs."""
        return self._executor.temporaries()

    def reset_prefix_cache(self) -> int:
        """Forget every cached page that no sequence uses; how many those were."""
        return self._kv.reset_prefix_cache()

    def check(self) -> None:
        """Raises AssertionError unless slots and pages are all accounted for."""
        self._scheduler.check()


def _new_kv(model: Model, engine: ResolvedEngine) -> KVManager:
    return KVManager(
        KVConfig(
            pages=engine.num_pages,
            page_size=engine.page_size,
            slots=engine.rows,
            width=engine.table_width,
            windows=model.cache_spec.windows,
            host_pages=engine.host_pages,
            prefix_caching=engine.enable_prefix_caching,
        )
    )


def _drafter(engine: ResolvedEngine) -> Drafter | None:
    if engine.speculative is None:
        return None
    return NgramDrafter(engine.prompt_lookup_min, engine.prompt_lookup_max)
