"""Load of a run: open loop at a rate or with the arrivals of a trace, or closed loop with a number of users."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from jaxinfer.bench.options import DEFAULT_REQUESTS, DEFAULT_SWEEP_SECONDS, DEFAULT_USERS
from jaxinfer.bench.target import Item


@dataclasses.dataclass(frozen=True)
class Load:
    """Arrival of requests: one of ``rate`` (requests per second), ``speed`` (of a trace) and ``users`` is not None."""

    rate: float | None = None
    speed: float | None = None
    users: int | None = None
    burstiness: float = 1.0
    requests: int | None = None
    duration: float | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Load:
        load = cls(None, options.speed, None, options.burstiness, options.num_requests, options.duration)
        limited = options.num_requests or options.duration
        if options.sweep:
            rate = options.request_rate or 1.0
            return dataclasses.replace(load, rate=rate, duration=options.duration if limited else DEFAULT_SWEEP_SECONDS)
        if not limited:
            load = dataclasses.replace(load, requests=DEFAULT_REQUESTS)
        if options.request_rate or options.speed:
            return dataclasses.replace(load, rate=options.request_rate)
        return dataclasses.replace(load, users=options.concurrency or DEFAULT_USERS)

    def due(self, items: Iterator[Item], rng: np.random.Generator) -> Iterator[tuple[float, Item]]:
        """Yield the items of the open loop with their due times in seconds."""
        end = math.inf if self.duration is None else self.duration
        within = itertools.takewhile(lambda each: each[0] < end, self._timed(items, rng))
        return itertools.islice(within, self.requests)

    def _timed(self, items: Iterator[Item], rng: np.random.Generator) -> Iterator[tuple[float, Item]]:
        if self.rate is not None:
            return zip(arrivals(self.rate, self.burstiness, rng), items, strict=False)
        assert self.speed is not None
        return ((item.due / self.speed, item) for item in items if item.due is not None)


def arrivals(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield endless due times in order, the first one after a gap; gaps are gamma distributed with mean ``1 / rate``.

    Args:
        rate: requests per second; infinite: all are due at 0.
        burstiness: shape of the distribution: 1 is a Poisson process, smaller values are bursty, larger ones more even
            (the squared coefficient of variation is its inverse); infinite: constant gaps.
    """
    time = 0.0
    while True:
        for gap in _gaps(rate, burstiness, rng):
            time += gap
            yield time


def _gaps(rate: float, burstiness: float, rng: np.random.Generator, size: int = 1024) -> list[float]:
    if math.isinf(rate) or math.isinf(burstiness):
        return [0.0 if math.isinf(rate) else 1 / rate] * size
    gaps: list[float] = rng.gamma(burstiness, 1 / (rate * burstiness), size).tolist()
    return gaps
