"""Search for the knee: the highest rate at which a server meets its goals."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator


@dataclasses.dataclass(frozen=True)
class Knee:
    """Result of a search, with rates in requests per second.

    Attributes:
        holds: the highest rate that held; None: not even the lowest one tried.
        breaks: the lowest rate that did not hold; None: none was found up to the limit.
        doubted: the generator was the bottleneck at one of the two: the result is not about the server.
    """

    holds: float | None
    breaks: float | None
    doubted: bool = False


@dataclasses.dataclass(frozen=True)
class Search:
    """Search strategy.

    Attributes:
        start: the first rate.
        precision: the search ends at this relative gap of the lowest rate that breaks and the highest that holds.
        lowest, highest: bounds of the rates.
    """

    start: float
    precision: float = 0.1
    lowest: float = 1 / 64
    highest: float = 65536.0

    def rates(self) -> Generator[float, bool, Knee]:
        """Yield rates to try, and receive whether each held: double (or halve, if the first breaks), then bisect."""
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
