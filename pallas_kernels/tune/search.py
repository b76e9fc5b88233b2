"""The search for the fastest tiles within a time limit, without a GPU, so that tests can use a fake clock.

Candidates are prepared (compiled and compared with the heuristic's result) in the order of their distance from the
fastest one so far, and dropped at once if they are far slower. The remaining ones run in turns, so that a drifting
clock rate affects all of them equally; clearly slower ones are dropped.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from pallas_kernels.specs import Problem

FAR = 1.3  # times the leader's time: not worth a second sample
SLOWER = 1.04  # a candidate whose best sample is above the leader's median by this factor will not win
ROUNDS = 9
FEWEST = 3  # fewest samples of a winner, unless the search ended before any candidate had that many
GAIN = 0.99  # of the heuristic's time: a smaller gain is noise, and the heuristic stays
SCREENING = 0.7  # share of the time for candidates that have not run yet


@runtime_checkable
class Bench(Protocol):
    """A runner of candidates."""

    def prepare(self, tiles: Any) -> str | None:
        """Compile and run; later tiles must give the results of the first. Return why it may not win, or None."""

    def sample(self, tiles: Any) -> float:
        """Measure a launch in microseconds."""


@dataclasses.dataclass
class Sweep:
    """The state of one search.

    Attributes:
        candidates: the heuristic's tiles first.
        clock: seconds; ``deadline`` is one of its times.
        samples: microseconds, of every candidate that may win.
        refused: reasons for the rejected candidates.
        slow: candidates that are no longer sampled.
        interrupted: Ctrl-C ended it.
    """

    candidates: Sequence[Any]
    bench: Bench
    clock: Callable[[], float]
    deadline: float
    samples: dict[Any, list[float]] = dataclasses.field(default_factory=dict)
    refused: dict[Any, str] = dataclasses.field(default_factory=dict)
    slow: set[Any] = dataclasses.field(default_factory=set)
    interrupted: bool = False

    def run(self) -> Any | None:
        """Return the fastest tiles: the heuristic's if nothing is faster by a percent, None if those failed."""
        try:
            self._screen()
            self._race()
        except KeyboardInterrupt:
            self.interrupted = True
        return self.winner()

    def winner(self) -> Any | None:
        first = self.candidates[0]
        if not self.samples.get(first):
            return None
        fewest = min(FEWEST, max(map(len, self.samples.values())))
        enough = [one for one, times in self.samples.items() if len(times) >= fewest and one not in self.slow]
        best = min(enough, key=self.microseconds, default=first)
        return best if self.microseconds(best) < GAIN * self.microseconds(first) else first

    @property
    def tried(self) -> int:
        return len(self.samples) + len(self.refused)

    def microseconds(self, tiles: Any) -> float:
        return statistics.median(self.samples[tiles])

    def _screen(self) -> None:
        start = self.clock()
        end, longest = start + SCREENING * (self.deadline - start), 0.0
        waiting = list(self.candidates)
        leader = waiting[0]
        while waiting and self.clock() + longest < end:
            tiles = min(waiting, key=lambda one: distance(one, leader))
            waiting.remove(tiles)
            begun = self.clock()
            self._try(tiles)
            longest = max(longest, self.clock() - begun)
            if self.candidates[0] in self.refused:
                return
            leader = min(self.samples, key=self.microseconds)

    def _try(self, tiles: Any) -> None:
        if why := self.bench.prepare(tiles):
            self.refused[tiles] = why
            return
        self.samples[tiles] = [self.bench.sample(tiles)]
        leader = min(map(self.microseconds, self.samples))
        if self.microseconds(tiles) > FAR * leader and tiles != self.candidates[0]:
            self.slow.add(tiles)

    def _race(self) -> None:
        for _ in range(ROUNDS):
            running = [one for one in self.samples if one not in self.slow]
            if len(running) < 2 and len(self.samples.get(self.candidates[0], ())) >= FEWEST:
                return
            for tiles in running:
                if self.clock() >= self.deadline:
                    return
                self.samples[tiles].append(self.bench.sample(tiles))
            self._eliminate(running)

    def _eliminate(self, running: Sequence[Any]) -> None:
        """Drop slow tiles, but never the heuristic's, which the winner is compared with."""
        leader = min(map(self.microseconds, running), default=math.inf)
        for tiles in running:
            late = len(self.samples[tiles]) >= FEWEST and min(self.samples[tiles]) > SLOWER * leader
            if late and tiles != self.candidates[0]:
                self.slow.add(tiles)


def distance(one: Any, other: Any) -> tuple[int, float]:
    """Return the number of fields in which two tiles differ, and the total difference in octaves."""
    pairs = list(zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True))
    return sum(a != b for a, b in pairs), math.fsum(abs(math.log2(a / b)) for a, b in pairs)


def candidates(problem: Problem, fixed: Mapping[str, int]) -> list[Any]:
    """List the heuristic's tiles, then all of the grid that the kernel supports. Fields in ``fixed`` are set to it."""
    grid: list[dict[str, int]] = [{}]
    for name, values in problem.grid.items():
        grid = [{**one, name: value} for one in grid for value in ([fixed[name]] if name in fixed else values)]
    tiles = [_made(problem, fields) for fields in (dict(fixed), *grid)]
    return list(dict.fromkeys(one for one in tiles if one is not None))


def _made(problem: Problem, fields: Mapping[str, int]) -> Any | None:
    """Make tiles; None if they or the kernel reject these numbers."""
    try:
        tiles = dataclasses.replace(problem.heuristic, **fields)
    except ValueError:
        return None
    return None if problem.refusal(tiles) else tiles
