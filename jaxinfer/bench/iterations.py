"""Iterations of offline benchmarks: several engines take turns, and each has a clock that stands meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxinfer.bench.datasets import DatasetError
from jaxinfer.bench.figures import Goals, percentiles, summary
from jaxinfer.bench.record import Record
from jaxinfer.bench.target import Item

WARM_REQUESTS = 16  # at most, of an iteration that is not measured


@dataclasses.dataclass(frozen=True)
class Ran:
    """What an engine reports of one iteration: its seconds, and of each request the tokens with the seconds at which
    they were there, and the reason of its end (None: not known)."""

    seconds: float
    deliveries: Sequence[Sequence[tuple[float, int]]]
    finishes: Sequence[str | None]


@runtime_checkable
class Backend(Protocol):
    """An engine under test."""

    def run(self, items: Sequence[Item]) -> Ran:
        """Generate the outputs of requests that all are there at the start. Prompts are token ids."""
        ...

    def figures(self) -> Mapping[str, Any]:
        """Return what else is known of the measured iterations."""
        ...

    def close(self) -> None: ...


class Measured:
    """Records of one engine. Its iterations follow one another on its own clock: rates are those of its time."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.records: list[Record] = []
        self.iterations: list[float] = []  # seconds of each

    def run(self, items: Sequence[Item]) -> None:
        """Measure an iteration."""
        start, ran = sum(self.iterations), self.backend.run(items)
        self.iterations.append(ran.seconds)
        for item, deliveries, finish in zip(items, ran.deliveries, ran.finishes, strict=True):
            record = Record(len(self.records), start, start, item.prompt_len, item.output_len, finish=finish)
            for seconds, tokens in deliveries:
                record.note(start + seconds, tokens)
            record.ended = record.times[-1] if record.times else start + ran.seconds
            record.prompt_tokens, record.output_tokens = item.prompt_len, sum(record.counts)
            self.records.append(record)

    def figures(self) -> dict[str, Any]:
        """Return the statistics of all iterations: those of `bench serve`, and ``iteration``, the seconds of each."""
        found = summary(self.records, Goals()) | dict(self.backend.figures())
        found["latency"] = {"iteration": percentiles(self.iterations), **found["latency"]}
        return found | {"iterations": self.iterations}


def measure(
    backends: Mapping[str, Backend],
    items: Iterator[Item],
    *,
    requests: int,
    warmup: int,
    iterations: int,
    on_iteration: Callable[[int], None] = lambda done: None,
) -> dict[str, dict[str, Any]]:
    """Run all iterations and return the figures of each engine, by its name.

    All engines get the same requests of each iteration, and another one is the first each time.

    Args:
        requests: those of an iteration; ``items`` ends with fewer where the data set does.
        on_iteration: called with the number of measured iterations so far.

    Raises:
        DatasetError: there are no requests left.
    """
    for batch in _batches(items, min(requests, WARM_REQUESTS), warmup):
        for backend in backends.values():
            backend.run(batch)
    measured = {name: Measured(backend) for name, backend in backends.items()}
    for done, batch in enumerate(_batches(items, requests, iterations)):
        names = list(measured)
        for name in names[done % len(names) :] + names[: done % len(names)]:
            measured[name].run(batch)
        on_iteration(done + 1)
    return {name: each.figures() for name, each in measured.items()}


def _batches(items: Iterator[Item], size: int, number: int) -> Iterator[list[Item]]:
    for _ in range(number):
        batch = list(itertools.islice(items, size))
        if not batch:
            raise DatasetError("the data set has too few requests: fewer iterations, or warm-ups, please")
        yield batch
