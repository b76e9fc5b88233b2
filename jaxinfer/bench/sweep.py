"""The search for the knee: the highest rate at which a server still does what it should."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator


@dataclasses.dataclass(frozen=True)
class Knee:
    """Rates in requests a second.

    Attributes:
        holds: the highest one that held; None: not even the lowest that was tried.
        breaks: the lowest one that did not; None: none was found up to the limit.
        doubted: at one of the two the generator was the bottleneck: it says nothing of the server.
    """

    holds: float | None
    breaks: float | None
    doubted: bool = False


@dataclasses.dataclass(frozen=True)
class Search:
    """
    Attributes:
        start: the first rate.
        precision: the search ends when the lowest rate that breaks is at most so much above the highest that holds.
        lowest, highest: rates beyond which it does not go.
    """

    start: float
    precision: float = 0.1
    lowest: float = 1 / 64
    highest: float = 65536.0

    def rates(self) -> Generator[float, bool, Knee]:
        """Yields a rate to try and is sent whether it held: doubles (or halves, if the first breaks), then bisects."""
        rate = self.start
        holds = yield rate
        factor, low, high = (2.0, rate, None) if holds else (0.5, None, rate)
        while low is None or high is None:
            rate *= factor
            if not self.lowest <= rate <= self.highest:
                return Knee(low, high)
            if (yield rate):
                low = rate
            else:
                high = rate
        while high > low * (1 + self.precision):
            middle = (low * high) ** 0.5  # precision is relative
            if (yield middle):
                low = middle
            else:
                high = middle
        return Knee(low, high)
