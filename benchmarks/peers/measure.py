"""Rates from the arrival times of tokens: one definition for every peer."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.peers.protocol import Reply


class TooShort(ValueError):
    """Error: the sequences hardly decoded together, so there is no steady state to measure."""


def prefill_rate(reply: Reply, prompt_len: int) -> float:
    """Return prompt tokens a second: all prompts' tokens over the time until each sequence had its first token."""
    return len(reply["times"]) * prompt_len / max(times[0] for times in reply["times"])


def decode_rate(reply: Reply) -> float:
    """Return tokens a second while all sequences decode: tokens after the last sequence's first token, up to the first
    sequence's last, over the time between. In lockstep, these are all tokens but the first.

    Raises:
        TooShort: fewer than half of the tokens came within that time.
    """
    begin = max(times[0] for times in reply["times"])
    end = min(times[-1] for times in reply["times"])
    within = sum(begin < time <= end for times in reply["times"] for time in times)
    most = sum(len(times) - 1 for times in reply["times"])
    if 2 * within < most or within == 0:
        raise TooShort(f"only {within} of {most} tokens came while all sequences decoded: more --new-tokens, please")
    return within / (end - begin)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and range of several runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the ratio of ``mine`` to ``theirs`` by round: slowdowns of a whole round cancel."""
    return Spread.of([a / b for a, b in zip(mine, theirs, strict=True)])


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Agreement of two peers' greedy tokens: equal sequences, all sequences, fewest equal tokens before a difference
    (None: there is none)."""

    equal: int
    sequences: int
    first_difference: int | None

    @classmethod
    def of(cls, mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Agreement:
        pairs = list(zip(mine, theirs, strict=True))
        starts = [_equal_start(a, b) for a, b in pairs if list(a) != list(b)]
        return cls(len(pairs) - len(starts), len(pairs), min(starts, default=None))


def _equal_start(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
