"""Arrival processes: due times of requests, in seconds since the run began."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np


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
