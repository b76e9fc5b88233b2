"""Several engines with the interface of one: replicas, or ranks of data-parallel attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxinfer.compilations import compilations_during
from jaxinfer.config import EngineConfig, ResolvedEngine
from jaxinfer.engine.core import Pace, PauseMode, seed_source, seeded
from jaxinfer.engine.distributed.lockstep import Lockstep
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.on_policy import ServedPrograms
from jaxinfer.engine.scheduling.queues import Queued, require_capacity
from jaxinfer.engine.scheduling.stats import EngineStats, merged
from jaxinfer.engine.scheduling.usage import Usage, joined
from jaxinfer.kv.journal import Journal
from jaxinfer.models.model import Model
from jaxinfer.sampling import SamplingLimits
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import FinishReason, Request, SequenceDelta


class Replicas:
    """An `EngineCore` of several engines. A request is served by one of them from its first to its last token.

    One thread drives all engines: all steps are launched before the first result is read. `EngineCore` documents the
    methods.

    Args:
        config: settings of all engines together: the queue limits are totals.
        copies: number of replicas of the model.
        lockstep: runs the steps of data-parallel attention ranks; None: each engine has its own devices.
    """

    def __init__(
        self, engines: Sequence[Engine], config: EngineConfig, copies: int, lockstep: Lockstep | None = None
    ) -> None:
        self._engines, self.loras, self.lockstep = engines, engines[0].loras, lockstep
        self.config: ResolvedEngine = dataclasses.replace(
            engines[0].config,
            data_parallel_size=copies,
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_sequences=config.max_waiting_sequences,
            max_waiting_tokens=config.max_waiting_tokens,
        )
        self._owners: dict[str, tuple[Engine, set[int]]] = {}  # engine and unfinished samples of each request
        self._new_seed = seed_source(self.config)
        if lockstep is not None:  # devices are busy while any rank has a step
            for engine in engines:
                engine.busy = engines[0].busy
        self._compiled = compilations_during(self)

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
        request = seeded(request, self._new_seed)  # here: so a seed does not depend on how many replicas there are
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
        if self.lockstep is not None:
            self.lockstep.run()
        deltas = [delta for engine, launched in working for delta in engine.read(launched)]
        for delta in deltas:
            if delta.finish_reason is not None and delta.request_id in self._owners:
                self._ended(delta.request_id, delta.index)
        return deltas

    def stats(self) -> EngineStats:
        """Sum the statistics of all replicas."""
        return merged([engine.stats() for engine in self._engines], self._compiled.count)

    def usage(self) -> Usage:
        return joined([engine.usage() for engine in self._devices])

    def temporaries(self) -> int:
        return max(engine.temporaries() for engine in self._engines)

    def served_programs(self) -> ServedPrograms:
        return self._engines[0].served_programs()

    def reset_prefix_cache(self) -> int:
        return sum(engine.reset_prefix_cache() for engine in self._engines)

    @property
    def weight_version(self) -> int:
        return self._engines[0].weight_version

    @property
    def shares_weights(self) -> bool:
        return self._engines[0].shares_weights

    @shares_weights.setter
    def shares_weights(self, shares: bool) -> None:
        for engine in self._engines:
            engine.shares_weights = shares

    @property
    def pace(self) -> Pace:
        paces = {engine.pace for engine in self._engines}
        return Pace.DRAINING if Pace.DRAINING in paces else self._engines[0].pace

    def pause(self, mode: PauseMode = "wait") -> None:
        for engine in self._engines:
            engine.pause(mode)

    def resume(self) -> None:
        for engine in self._engines:
            engine.resume()

    def stage(self, model: Model, *, drafts: bool = False) -> list[Any]:
        return [engine.stage(model, drafts=drafts) for engine in self._devices]

    def swap(self, weights: Sequence[list[Any]], version: int, *, restart: bool = True) -> None:
        for engine in self._engines:
            engine.settle()
        for number, engine in enumerate(self._devices):
            engine.swap([each[number] for each in weights], version, restart=restart)
        for engine in self._engines[len(self._devices) :]:
            engine.renew(version, restart=restart)

    def sleep(self, *, cache: bool, weights: bool) -> None:
        for engine in self._engines:
            engine.doze()
        for engine in self._devices:
            engine.sleep(cache=cache, weights=weights)

    def wake(self) -> None:
        for engine in self._devices:
            engine.wake()

    @property
    def _devices(self) -> Sequence[Engine]:
        """One engine for each set of devices: the first rank's for all ranks."""
        return self._engines if self.lockstep is None else self._engines[:1]

    def journals(self) -> list[Journal]:
        return [journal for engine in self._engines for journal in engine.journals()]

    def check(self) -> None:
        for engine in self._engines:
            engine.check()
