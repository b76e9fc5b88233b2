"""Self-monitoring of the load generator: its lateness, event loop lag, and CPU share."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.bench.figures import percentiles
from jaxinfer.bench.record import Record

INTERVAL = 0.01  # seconds between samples of the event loop


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Limits below which a run measures the server rather than the generator: seconds at the 99th percentile, and the
    share of one CPU."""

    lateness: float = 0.010
    lag: float = 0.010
    cpu_share: float = 0.90


class Watch:
    """Monitor of the generator between `start` and `stop`."""

    def __init__(self, clock: Callable[[], float], cpu: Callable[[], float] = time.process_time) -> None:
        self._clock, self._cpu = clock, cpu
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._began = self._ended = (0.0, 0.0)

    def start(self) -> None:
        self._began = (self._clock(), self._cpu())
        self._task = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while True:
            due = self._clock() + INTERVAL
            await asyncio.sleep(INTERVAL)
            self._lags.append(max(0.0, self._clock() - due))

    async def stop(self) -> None:
        self._ended = (self._clock(), self._cpu())
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def report(self, records: Sequence[Record], bounds: Bounds, *, open_loop: bool) -> dict[str, Any]:
        """Return the generator's own statistics, in seconds, and ``doubts``: why it distorts the measurement."""
        seconds, cpu = (end - begin for begin, end in zip(self._began, self._ended, strict=True))
        deliveries = sum(len(record.times) for record in records)
        late = [record.sent - record.due for record in records]
        found = {
            "lateness": percentiles(late) if late and open_loop else None,
            "loop_lag": percentiles(self._lags) if self._lags else None,
            "cpu_share": cpu / seconds if seconds else 0.0,
            "cpu_seconds_per_delivery": cpu / deliveries if deliveries else None,
            "deliveries_per_second": deliveries / seconds if seconds else 0.0,
        }
        return found | {"bounds": dataclasses.asdict(bounds), "doubts": _doubts(found, bounds)}


def _doubts(found: dict[str, Any], bounds: Bounds) -> list[str]:
    doubts = []
    for name, words, bound in (
        ("lateness", "requests left late", bounds.lateness),
        ("loop_lag", "its event loop lagged", bounds.lag),
    ):
        if found[name] is not None and found[name]["p99"] > bound:
            doubts.append(f"{words}: p99 {found[name]['p99'] * 1e3:.1f} ms, bound {bound * 1e3:g} ms")
    if found["cpu_share"] > bounds.cpu_share:
        doubts.append(f"it used {found['cpu_share']:.0%} of a processor, bound {bounds.cpu_share:.0%}")
    return doubts
