"""Data parallelism: several engines on separate devices, with the interface of one engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import weakref
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfig, ResolvedEngine
from jaxinfer.engine.distributed.leader import LeaderExecutor
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.compiled import CompileProgress
from jaxinfer.engine.execution.executor import LocalExecutor, MakeExecutor
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.engine.scheduling.queues import Queued, require_capacity
from jaxinfer.engine.scheduling.stats import EngineStats, merged
from jaxinfer.kv.journal import Journal
from jaxinfer.lora.store import LoRAStore
from jaxinfer.models.model import Model
from jaxinfer.parallel.group import Group
from jaxinfer.parallel.mesh import mesh_for, replicas
from jaxinfer.parallel.processes import own_devices, processes_of
from jaxinfer.sampling import SamplingLimits
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import FinishReason, Request, SequenceDelta


class Replicas:
    """An `EngineCore` of several engines. A request is served by one replica from its first to its last token.

    Every setting applies to each replica, with two exceptions: the queue limits and ``swap_space_gib`` are totals. One
    thread drives all replicas: all steps are launched before the first result is read. `EngineCore` documents the
    methods.

    Args:
        progress: see `Engine`.
        mesh: devices of all replicas; None: the first ones.
        group: process group whose processes have the devices of the replicas.
        loras: adapters that requests may name, shared by all replicas; None: requests have none.

    Raises:
        EngineConfigError: a setting cannot be served.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        platform: str,
        progress: CompileProgress | None = None,
        mesh: Mesh | None = None,
        group: Group | None = None,
        loras: LoRAStore | None = None,
    ) -> None:
        places, engines = replicas(mesh or mesh_for(config)), list[Engine]()
        one = dataclasses.replace(config_of_each(config, len(places)), data_parallel_size=1)
        prepared = prepare(model, one, platform, places[0])  # shared: replicas differ only in their devices
        local = sum(bool(own_devices(place)) for place in places)  # the first ones
        for number, place in enumerate(places):
            on_progress, make = share(progress, number, local), make_for(group, number, place)
            found = None if own_devices(place) else engines[0].calibration  # of the same programs on identical devices
            engines.append(Engine(prepared, place, on_progress, make, found, loras))
        self._begin(engines, config, len(places))

    def _begin(self, engines: Sequence[Engine], config: EngineConfig, copies: int) -> None:
        """Start serving; ``config`` is that of all engines together."""
        self._engines, self.loras = engines, engines[0].loras
        self.config: ResolvedEngine = dataclasses.replace(
            engines[0].config,
            data_parallel_size=copies,
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_sequences=config.max_waiting_sequences,
            max_waiting_tokens=config.max_waiting_tokens,
        )
        self._owners: dict[str, tuple[Engine, set[int]]] = {}  # engine and unfinished samples of each request
        self._seeds = np.random.default_rng(config.seed if config.seed is not None else secrets.randbits(64))
        ready = contextlib.ExitStack()
        self._compiled = ready.enter_context(count_compilations())
        weakref.finalize(self, ready.close)

    @property
    def limits(self) -> SamplingLimits:
        return self._engines[0].limits

    @property
    def has_work(self) -> bool:
        return any(engine.has_work for engine in self._engines)

    def add(self, request: Request) -> Request:
        if request.request_id in self._owners:
            raise RequestError("request_id", f"={request.request_id!r} is in use")
        self.check_capacity(request)
        if request.params.seed is None:  # drawn here: so a seed does not depend on how many replicas there are
            seed = int(self._seeds.integers(2**63))
            request = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=seed))
        engine = self._choose(request)
        engine.add(request)
        self._owners[request.request_id] = engine, set(range(request.params.n))
        return request

    def _choose(self, request: Request) -> Engine:
        """Return the replica with the most cached prompt tokens, among those with hardly more load than others."""
        alive = [engine.alive for engine in self._engines]
        most = min(alive) + self.config.max_num_seqs // 2
        rank = {
            place: (-self._engines[place].cached(request), count) for place, count in enumerate(alive) if count <= most
        }
        return self._engines[min(rank, key=rank.__getitem__)]

    def check_capacity(self, request: Request, ahead: int = 0) -> None:
        queued = Queued(*map(sum, zip(*(engine.queued for engine in self._engines), strict=True)))
        require_capacity(self.config, queued, request, ahead)

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        if (owner := self._owners.get(request_id)) is not None:
            owner[0].abort(request_id, index, reason)
            self._ended(request_id, index)

    def _ended(self, request_id: str, index: int | None) -> None:
        _, left = self._owners[request_id]
        left.difference_update([index] if index is not None else list(left))
        if not left:
            del self._owners[request_id]

    def step(self) -> list[SequenceDelta]:
        working = [(engine, engine.launch()) for engine in self._engines if engine.has_work]
        self._launched()
        deltas = [delta for engine, launched in working for delta in engine.read(launched)]
        for delta in deltas:
            if delta.finish_reason is not None and delta.request_id in self._owners:
                self._ended(delta.request_id, delta.index)
        return deltas

    def _launched(self) -> None:
        """Hook after every engine has launched its step, and before the first read."""

    def stats(self) -> EngineStats:
        """Sum the statistics of all replicas."""
        return merged([engine.stats() for engine in self._engines], self._compiled.count)

    def temporaries(self) -> int:
        return max(engine.temporaries() for engine in self._engines)

    def reset_prefix_cache(self) -> int:
        return sum(engine.reset_prefix_cache() for engine in self._engines)

    def journals(self) -> list[Journal]:
        return [journal for engine in self._engines for journal in engine.journals()]

    def check(self) -> None:
        for engine in self._engines:
            engine.check()


def make_for(group: Group | None, number: int, mesh: Mesh) -> MakeExecutor:
    """Return the executor factory of a replica, where ``number`` counts the replicas of a group."""
    return LocalExecutor if group is None else functools.partial(LeaderExecutor, group, number, processes_of(mesh))


def config_of_each(config: EngineConfig, count: int) -> EngineConfig:
    """Return the settings of one of several engines: swap space is divided, the group enforces queue limits."""
    share = config.swap_space_gib / count
    unbounded = dataclasses.replace(
        config, max_waiting_requests=None, max_waiting_sequences=None, max_waiting_tokens=None
    )
    return dataclasses.replace(unbounded, swap_space_gib=share)


def share(progress: CompileProgress | None, number: int, replicas: int) -> CompileProgress | None:
    """Scale one replica's progress to that of all replicas, which have as many programs each."""
    if progress is None:
        return None

    def on_progress(done: int, total: int) -> None:
        progress(number * total + done, replicas * total)

    return on_progress
