"""Replay of a trace: requests enter when they are due; a token is timed when the caller receives it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxinfer.bench.datasets import prompt_material
from jaxinfer.bench.figures import percentiles
from jaxinfer.bench.prompts import Ids
from jaxinfer.bench.traces import Trace, TraceRequest
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request, SequenceDelta


class Counters(NamedTuple):
    """Counters of an engine since it began: prompt tokens looked up in the prefix cache and found there, sequences
    preempted."""

    queries: int
    hits: int
    preemptions: int


class Occupancy(NamedTuple):
    """Tokens of the running sequences: those with keys and values, and the capacity of their pages."""

    used: int
    allocated: int


class Server(Protocol):
    """Protocol of an engine that `replay` drives, such as `real.RealServer` and `fake.FakeServer`."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> object: ...

    def step(self) -> Sequence[SequenceDelta]: ...

    def now(self) -> float:
        """Return the time in seconds; without a device, simulated time."""
        ...

    def wait(self, seconds: float) -> None: ...

    def counters(self) -> Counters: ...

    def occupancy(self) -> Occupancy: ...


@dataclasses.dataclass
class Times:
    """Times at which a request was due, and its first and latest token came; seconds since the replay began."""

    due: float
    prompt_len: int
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0

    @property
    def ttft(self) -> float:
        return self.first - self.due

    @property
    def tpot(self) -> float | None:
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Result of one replay. ``used`` and ``allocated`` are sums over steps (`Occupancy`)."""

    seconds: float
    steps: int
    times: list[Times]
    counters: Counters
    used: int
    allocated: int

    @property
    def output_tokens(self) -> int:
        return sum(times.tokens for times in self.times)

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        """Return the reported figures; times in seconds, shares from 0 to 1."""
        prompts = sum(times.prompt_len for times in self.times)
        tpots = [times.tpot for times in self.times if times.tpot is not None]
        return {
            "requests": len(self.times),
            "seconds": self.seconds,
            "steps": self.steps,
            "prompt_tokens": prompts,
            "output_tokens": self.output_tokens,
            "output_tokens_per_second": self.rate,
            "tokens_per_second": (prompts + self.output_tokens) / self.seconds,
            "requests_per_second": len(self.times) / self.seconds,
            "ttft": percentiles([times.ttft for times in self.times]),
            "tpot": percentiles(tpots) if tpots else None,
            "kv_waste": 1 - self.used / self.allocated if self.allocated else None,
            "prefix_hit_rate": self.counters.hits / self.counters.queries if self.counters.queries else 0.0,
            "prefix_hit_tokens": self.counters.hits,
            "preemptions": self.counters.preemptions,
        }


class Arrival(NamedTuple):
    """A request and the second at which it is due; ``make`` builds it, so that only live requests take memory."""

    due: float
    make: Callable[[], Request]


def arrivals(trace: Trace, vocab: int, seed: int, speed: float | None) -> Iterable[Arrival]:
    """Yield the requests of a trace: greedy, of exactly the recorded lengths.

    Args:
        speed: how much faster than recorded; None: all are due at once.
    """
    for number, request in enumerate(trace.requests):
        due = 0.0 if speed is None else request.arrival / speed
        yield Arrival(due, _maker(trace, request, f"{seed}-{number}", vocab, seed))


def _maker(trace: Trace, request: TraceRequest, name: str, vocab: int, seed: int) -> Callable[[], Request]:
    def make() -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True, seed=0)
        return Request(name, tuple(prompt_material(trace, request, Ids(vocab), seed).tolist()), params)

    return make


def replay(server: Server, incoming: Iterable[Arrival], *, outstanding: int | None = None) -> Replayed:
    """Serve all of ``incoming``, which are in order of time.

    Args:
        outstanding: most requests that have entered and not ended. A request delayed by this limit is due when it may
            enter: such a replay measures throughput, as with closed-loop clients.
    """
    return _Replay(server, incoming, outstanding).run()


class _Replay:
    def __init__(self, server: Server, incoming: Iterable[Arrival], outstanding: int | None) -> None:
        self._server, self._incoming, self._outstanding = server, iter(incoming), outstanding
        self._next = next(self._incoming, None)
        self._live: dict[str, Times] = {}
        self._times: list[Times] = []
        self._steps = self._used = self._allocated = 0

    def run(self) -> Replayed:
        server, before, self._start = self._server, self._server.counters(), self._server.now()
        while self._next is not None or server.has_work:
            self._enter()
            if server.has_work:
                self._step()
            elif self._next is not None:
                server.wait(max(0.0, self._next.due - self._now()))
        counters = Counters(*(after - first for after, first in zip(server.counters(), before, strict=True)))
        return Replayed(self._now(), self._steps, self._times, counters, self._used, self._allocated)

    def _now(self) -> float:
        return self._server.now() - self._start

    def _enter(self) -> None:
        while self._next is not None and self._next.due <= self._now():
            if self._outstanding is not None and len(self._live) >= self._outstanding:
                return
            request = self._next.make()
            due = self._next.due if self._outstanding is None else self._now()
            self._live[request.request_id] = times = Times(due, len(request.prompt_token_ids))
            self._times.append(times)
            self._server.add(request)
            self._next = next(self._incoming, None)

    def _step(self) -> None:
        deltas, now = self._server.step(), self._now()
        for delta in deltas:
            times = self._live[delta.request_id]
            if delta.token_ids and not times.tokens:
                times.first = now
            times.tokens, times.last = times.tokens + len(delta.token_ids), now
            if delta.finish_reason is not None:
                del self._live[delta.request_id]
        occupancy = self._server.occupancy()
        self._steps += 1
        self._used += occupancy.used
        self._allocated += occupancy.allocated


def describe(figures: Mapping[str, Any]) -> str:
    """Format the lines that are printed for one replay."""

    def spread(name: str) -> str:
        found = figures[name]
        return "none" if found is None else " / ".join(f"{found[p] * 1e3:.1f}" for p in ("p50", "p90", "p99"))

    waste = figures["kv_waste"]
    return "\n".join(
        [
            f"requests           {figures['requests']} in {figures['seconds']:.2f} s, {figures['steps']} steps",
            f"output tokens      {figures['output_tokens']}: {figures['output_tokens_per_second']:.1f} tokens/s "
            f"({figures['tokens_per_second']:.0f} with prompts)",
            f"TTFT p50/p90/p99   {spread('ttft')} ms",
            f"TPOT p50/p90/p99   {spread('tpot')} ms",
            f"KV waste           {'none' if waste is None else f'{waste:.2%}'}",
            f"prefix hit rate    {figures['prefix_hit_rate']:.2%}",
            f"preemptions        {figures['preemptions']}",
        ]
    )
