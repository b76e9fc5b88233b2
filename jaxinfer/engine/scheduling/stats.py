"""Counters and timers of the engine. No jax.

The scheduler and the engine report events to a `StatsRecorder`; benchmarks print its `snapshot`, and
`jaxinfer.serve.telemetry.metrics` exports it to Prometheus.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64

from jaxinfer.engine.scheduling.usage import Usage
from jaxinfer.kv.manager import KVUsage
from jaxinfer.lora.usage import LoRAUsage, merged_usage
from jaxinfer.types import FinishReason, Request

# A 1-2-5 series from 100 microseconds to 500 seconds: the small models decode a token in less than a millisecond.
SECONDS = tuple(round(digit * 10.0**power, 4) for power in range(-4, 3) for digit in (1, 2, 5))
PREEMPTIONS = ("recompute", "swap")


@dataclasses.dataclass(slots=True)
class Times:
    """Event times of one sequence, in seconds of the recorder's clock; ``tokens``: number of tokens timed so far."""

    arrival: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0


@runtime_checkable
class Timed(Protocol):
    """Protocol of a sequence, as far as the recorder needs it."""

    @property
    def request(self) -> Request: ...
    @property
    def index(self) -> int: ...
    @property
    def generated(self) -> int: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def times(self) -> Times: ...


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Observations by size. ``counts[i]`` are those of at most ``bounds[i]`` and more than the bound before; the last
    count is of observations beyond all bounds. ``sum`` is the sum of the observations."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean of the observations; NaN if there are none."""
        return self.sum / self.count if self.count else float("nan")


class HistogramRecorder:
    """Mutable histogram. ``bounds`` ascend."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._edges = np.asarray(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[self._edges.searchsorted(value)] += times
        self._sum += value * times

    def observe_many(self, values: Float64[np.ndarray, " n"], times: Int64[np.ndarray, " n"]) -> None:
        """Observe ``values[i]`` ``times[i]`` times."""
        places = self._edges.searchsorted(values)
        self._counts += np.bincount(places, times, len(self._counts)).astype(np.int64)
        self._sum += float(values @ times)

    def snapshot(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts.tolist()), self._sum)


@dataclasses.dataclass(frozen=True)
class WeightStats:
    """Weights of an engine that operators change.

    Attributes:
        version: version of the served weights; 0: those of the start.
        paused: nothing is computed until it is resumed.
        asleep: what has no memory: "kv_cache", "weights".
        update_time: seconds of placing and exchanging new weights, one observation for each update.
    """

    version: int
    paused: bool
    asleep: Sequence[str]
    update_time: Histogram


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Snapshot of the engine's figures. Counters count since the start, in tokens unless stated otherwise.

    Attributes:
        running: sequences in slots.
        waiting: sequences without a slot, by reason.
        kv: page usage, None where the caller gave none.
        loras: adapters, None where none are served.
        weights: their version, pauses and sleep; None where no server serves the engine.
        usage: memory and time of the devices; None where no server serves the engine (`EngineCore.usage`).
        compilations: programs compiled since the engine was ready; anything but 0 is a bug.
        prompt_tokens: tokens of the prompts that were given a slot, once per request.
        generated_tokens: all returned tokens.
        finished: sequences, by reason.
        preemptions: by kind, see `PREEMPTIONS`.
        prefix_queries, prefix_hits: tokens looked up in the prefix cache, and found there.
        encoder_queries, encoder_hits: images looked up in the encoder cache for prompt chunks, and found there; the
        others were encoded.
        drafts, draft_tokens, draft_accepted: verified drafts, their tokens, and the accepted tokens.
        draft_accepted_at: accepted tokens by position in the draft, the first position first.
        replayed_tokens, replay_mismatches: tokens recomputed after a preemption, and those that came out different.
        steps: executed plans.
        time_to_first_token, inter_token_latency, e2e_latency, queue_time, step_time, lora_load_time: in seconds, see
        `StatsRecorder`.
    """

    running: int = 0
    waiting: Mapping[str, int] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    kv: KVUsage | None = None
    loras: LoRAUsage | None = None
    weights: WeightStats | None = None
    usage: Usage | None = None
    compilations: int = 0
    prompt_tokens: int
    generated_tokens: int
    finished: Mapping[FinishReason, int]
    preemptions: Mapping[str, int]
    prefix_queries: int
    prefix_hits: int
    encoder_queries: int
    encoder_hits: int
    drafts: int
    draft_tokens: int
    draft_accepted: int
    draft_accepted_at: tuple[int, ...] = ()
    replayed_tokens: int
    replay_mismatches: int
    steps: int
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    step_time: Histogram
    lora_load_time: Histogram


def merged(stats: Sequence[EngineStats], compilations: int) -> EngineStats:
    """Merge the statistics of several engines."""
    found = {field.name: [getattr(each, field.name) for each in stats] for field in dataclasses.fields(EngineStats)}
    return EngineStats(**{**{name: _merged(values) for name, values in found.items()}, "compilations": compilations})


def _merged(values: Sequence[Any]) -> Any:
    match values[0]:
        case None:
            return None
        case int():
            return sum(values)
        case tuple():
            return tuple(map(sum, itertools.zip_longest(*values, fillvalue=0)))
        case Histogram() as first:
            counts = tuple(map(sum, zip(*(each.counts for each in values), strict=True)))
            return Histogram(first.bounds, counts, sum(each.sum for each in values))
        case LoRAUsage():
            return merged_usage(values)
        case KVUsage():
            return KVUsage(*map(sum, zip(*map(dataclasses.astuple, values), strict=True)))
        case _:
            return MappingProxyType({key: sum(each[key] for each in values) for key in values[0]})


_SECONDS = tuple(field.name for field in dataclasses.fields(EngineStats) if field.type == "Histogram")


@dataclasses.dataclass
class _Counters:
    """Counters of `EngineStats`."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    encoder_queries: int = 0
    encoder_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0
    replayed_tokens: int = 0
    replay_mismatches: int = 0
    steps: int = 0


class StatsRecorder:
    """Counts and times for one engine. One thread records; any thread may take a snapshot, which may then be partial
    with respect to a concurrent event.

    Args:
        clock: clock in seconds, the one of `Request.deadline`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counters = _Counters()
        self._finished = dict.fromkeys(FinishReason, 0)
        self._preemptions = dict.fromkeys(PREEMPTIONS, 0)
        self._draft_positions: list[int] = []
        self._seconds = {name: HistogramRecorder() for name in _SECONDS}

    def queued(self, sequence: Timed) -> None:
        """Record that a sequence arrived. Times are taken from the first call."""
        if sequence.times.arrival is None:
            sequence.times.arrival = self._clock()

    def scheduled(self, sequence: Timed) -> None:
        """Record that a sequence got a slot. Its queue time is that before the first slot."""
        times = sequence.times
        if times.first_scheduled is not None:
            return
        self.queued(sequence)
        assert times.arrival is not None
        times.first_scheduled = self._clock()
        self._seconds["queue_time"].observe(times.first_scheduled - times.arrival)
        if sequence.index == 0:
            self._counters.prompt_tokens += len(sequence.request.prompt_token_ids)

    def emitted(self, sequences: Iterable[Timed]) -> None:
        """Record the tokens that sequences have got since the last call.

        Several tokens of one sequence are treated as evenly spaced over the time since its last one, and those that
        come with its first token as 0 seconds after it: so the latencies of a sequence add up to the time from its
        first to its last token, however they were produced.
        """
        now, generated = self._clock(), 0
        gaps: list[float] = []
        counts: list[int] = []
        for sequence in sequences:
            times, total = sequence.times, sequence.generated
            new = total - times.tokens
            if not new:
                continue
            generated += new
            last, times.tokens, times.last_token = times.last_token, total, now
            if last is None:
                times.first_token = now
                self._seconds["time_to_first_token"].observe(now - (now if times.arrival is None else times.arrival))
                last, new = now, new - 1
            gaps.append(now - last)
            counts.append(new)
        self._counters.generated_tokens += generated
        if gaps:
            times_each = np.array(counts)
            self._seconds["inter_token_latency"].observe_many(np.array(gaps) / np.maximum(times_each, 1), times_each)

    def finished(self, sequence: Timed) -> None:
        """Record that a sequence ended, with its ``finish_reason``, in any state."""
        assert sequence.finish_reason is not None
        self._finished[sequence.finish_reason] += 1
        self.queued(sequence)
        assert sequence.times.arrival is not None
        self._seconds["e2e_latency"].observe(self._clock() - sequence.times.arrival)

    def preempted(self, kind: str) -> None:
        """Count a preemption; ``kind``: one of `PREEMPTIONS`."""
        self._preemptions[kind] += 1

    def prefix(self, queries: int, hits: int) -> None:
        """Count tokens that a sequence looked up in the prefix cache, and those it found."""
        self._counters.prefix_queries += queries
        self._counters.prefix_hits += hits

    def encoder(self, queries: int, hits: int) -> None:
        """Count images that a step looked up in the encoder cache, and those it found."""
        self._counters.encoder_queries += queries
        self._counters.encoder_hits += hits

    def drafted(self, tokens: int, accepted: int, depth: int | None = None) -> None:
        """Count a verified draft, its tokens and its accepted tokens. ``depth``: maximum depth of the draft; None: it
        is a single path of all its tokens."""
        self._counters.drafts += 1
        self._counters.draft_tokens += tokens
        self._counters.draft_accepted += accepted
        positions = self._draft_positions
        positions.extend([0] * ((tokens if depth is None else depth) - len(positions)))
        for place in range(accepted):
            positions[place] += 1

    def replayed(self, same: bool) -> None:
        """Count a known token that was recomputed."""
        self._counters.replayed_tokens += 1
        self._counters.replay_mismatches += not same

    def lora_wanted(self) -> float:
        """Return the time at which an adapter is missing, for `lora_loaded`."""
        return self._clock()

    def lora_loaded(self, wanted: float) -> None:
        """Record that an adapter is resident for which sequences have waited since ``wanted``: it was read, got a slot,
        and was written to the device."""
        self._seconds["lora_load_time"].observe(self._clock() - wanted)

    def step(self, seconds: float) -> None:
        """Record that a plan's results were read, ``seconds`` after those of the plan before."""
        self._counters.steps += 1
        self._seconds["step_time"].observe(seconds)

    def snapshot(
        self,
        *,
        running: int = 0,
        waiting: Mapping[str, int] | None = None,
        kv: KVUsage | None = None,
        loras: LoRAUsage | None = None,
        compilations: int = 0,
    ) -> EngineStats:
        """Return the current figures; the caller passes those that only the engine knows, see `EngineStats`."""
        seconds: dict[str, Any] = {name: recorder.snapshot() for name, recorder in self._seconds.items()}
        return EngineStats(
            running=running,
            waiting=MappingProxyType(dict(waiting or {})),
            kv=kv,
            loras=loras,
            compilations=compilations,
            **dataclasses.asdict(self._counters),
            draft_accepted_at=tuple(self._draft_positions),
            finished=MappingProxyType(dict(self._finished)),
            preemptions=MappingProxyType(dict(self._preemptions)),
            **seconds,
        )
