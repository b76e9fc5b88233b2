"""Engine load in the messages of `vllm.grpc.engine`, as polled by routers."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.serve.api.capacity import slots_of
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.vllm import messages
from jaxinfer.version import __version__

SECONDS = 1.0
"""Minimum averaging window of the rates in seconds; more frequent polls get the previous rates."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Generated tokens per second, and prefix cache hit rate by tokens."""

    tokens: float = 0.0
    hits: float = 0.0


class Loads:
    """GetLoads RPC: the aggregated figures of all replicas, reported as rank 0.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, EngineStats] | None = None
        self._rates = Rates()

    async def of(self, frontend: Frontend, rank: int = 0) -> messages.pb.GetLoadsResponse:
        """Return the current load; it is empty for a ``rank`` other than 0.

        Raises:
            ServeError: UNAVAILABLE: the engine does not run.
        """
        load = await self.load(frontend)
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return messages.pb.GetLoadsResponse(
            timestamp=now, version=__version__, dp_rank_count=1, loads=[] if rank else [load]
        )

    async def load(self, frontend: Frontend) -> messages.pb.SchedulerLoad:
        """Return the current load of the engine, see `of`."""
        stats = await frontend.stats()
        rates = self._rates_of(stats)
        engine, waiting, slots = frontend.card.engine, sum(stats.waiting.values()), slots_of(frontend.card.engine)
        load = messages.pb.SchedulerLoad(
            num_running_reqs=stats.running,
            num_waiting_reqs=waiting,
            num_total_reqs=stats.running + waiting,
            gen_throughput=rates.tokens,
            cache_hit_rate=rates.hits,
            utilization=stats.running / slots if slots else 0.0,
            max_running_requests=slots,
            # An upper bound: prefix cache hits are known only when the requests start.
            num_waiting_uncached_tokens=frontend.room.waiting.tokens,
        )
        if (kv := stats.kv) is not None and kv.total:
            load.num_used_tokens = kv.held * engine["page_size"]
            load.max_total_num_tokens = kv.total * engine["page_size"]
            load.token_usage = kv.held / kv.total
        return load

    def _rates_of(self, now: EngineStats) -> Rates:
        at, (then, before) = self._clock(), self._last or (self._clock(), now)
        if self._last is None or now.steps < before.steps:  # counters of a restarted engine begin at 0
            self._last, self._rates = (at, now), Rates()
        elif at - then >= SECONDS:
            queries = now.prefix_queries - before.prefix_queries
            hits = (now.prefix_hits - before.prefix_hits) / queries if queries else 0.0
            self._rates = Rates((now.generated_tokens - before.generated_tokens) / (at - then), hits)
            self._last = (at, now)
        return self._rates
