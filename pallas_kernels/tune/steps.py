"""A bench with calls as steps of a journal, so that a new process can continue after a candidate that hung or died."""

from __future__ import annotations

import collections
import math
from typing import Any

from pallas_kernels.supervise import Journal
from pallas_kernels.tune.search import Bench


class SteppedBench:
    """`search.Bench` of one task. Rejections and samples of earlier processes are reused.

    The first tiles are always prepared, as the results of others are compared with theirs. All others with earlier
    samples are prepared when a new sample of them is needed.
    """

    def __init__(self, bench: Bench, task: str, journal: Journal) -> None:
        self._bench, self._task, self._journal = bench, task, journal
        self._refused = dict(journal.progress().condemned)
        self._earlier = collections.defaultdict[str, list[float]](list)
        self._ready = set[Any]()
        for line in journal.lines():
            match line:
                case {"refused": name, "why": why}:
                    self._refused[name] = why
                case {"sampled": name, "microseconds": time}:
                    self._earlier[name].append(time)

    def prepare(self, tiles: Any) -> str | None:
        name = self._name(tiles)
        if name in self._refused or (self._ready and self._earlier[name]):
            return self._refused.get(name)
        return self._prepare(name, tiles)

    def sample(self, tiles: Any) -> float:
        name = self._name(tiles)
        if self._earlier[name]:
            return self._earlier[name].pop(0)
        if tiles not in self._ready and self._prepare(name, tiles) is not None:
            return math.inf
        with self._journal.step(name):
            time = self._bench.sample(tiles)
        self._journal.put(sampled=name, microseconds=time)
        return time

    def _name(self, tiles: Any) -> str:
        return f"{self._task}: {tiles}"

    def _prepare(self, name: str, tiles: Any) -> str | None:
        with self._journal.step(name):
            why = self._bench.prepare(tiles)
        if why is None:
            self._ready.add(tiles)
        else:
            self._journal.put(refused=name, why=why)
        return why
