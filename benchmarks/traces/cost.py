"""Host time of a scheduler's steps under a steady load, and its growth with the load."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.traces.fake import FakeServer, resolved
from jaxinfer.config import EngineConfig
from jaxinfer.engine.scheduling.scheduler import Scheduler
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request

MAX_LEN = 2048
PROMPTS, OUTPUTS = (32, 512), (64, 384)  # shortest and longest; a step ends about one in 224 sequences
GOAL_AT = 256  # sequences
MEDIAN_GOAL, P99_GOAL = 1e-3, 3e-3
GROWTH_GOAL = 1.15  # exponent of the median in the number of sequences; 1 is linear
WAITING_GOAL = 1.1  # median with a long queue over the median with an empty one


@dataclasses.dataclass(frozen=True)
class Load:
    """Steady load: ``sequences`` run and ``waiting`` requests are queued; each that ends is replaced."""

    sequences: int
    waiting: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> EngineConfig:
        settings = {"max_num_seqs": self.sequences, "max_model_len": MAX_LEN, "page_size": 16, **self.settings}
        return EngineConfig(**settings)


class Requests:
    """Endless supply of greedy requests of random lengths; prompts share no prefix."""

    def __init__(self, seed: int = 0) -> None:
        self._rng, self._numbers = np.random.default_rng(seed), itertools.count()

    def __next__(self) -> Request:
        prompt = self._rng.integers(32_000, size=int(self._rng.integers(*PROMPTS)))
        params = SamplingParams(temperature=0.0, max_tokens=int(self._rng.integers(*OUTPUTS)), ignore_eos=True, seed=0)
        return Request(str(next(self._numbers)), tuple(prompt.tolist()), params)


class Schedules(Protocol):
    """Protocol of an engine that can be put under a load."""

    @property
    def scheduler(self) -> Scheduler: ...

    def add(self, request: Request) -> None: ...

    def step(self) -> object: ...


class Steady:
    """A server under a load, warmed up: sequences are at all stages of decoding."""

    def __init__(self, load: Load, server: Schedules) -> None:
        self.server = server
        self._load, self._requests = load, Requests()
        for _ in range(OUTPUTS[1] + 2 * load.sequences):  # until the sequences that started together have ended
            self.step()

    def step(self) -> None:
        self.top_up()
        self.server.step()

    def top_up(self) -> None:
        """Replace the requests that have ended."""
        scheduler = self.server.scheduler
        present = scheduler.running + sum(scheduler.waiting.values())
        for _ in range(self._load.sequences + self._load.waiting - present):
            self.server.add(next(self._requests))


def without_device(load: Load) -> FakeServer:
    """Build a server of scheduler and page allocator alone."""
    return FakeServer(resolved(load.config, MAX_LEN))


@dataclasses.dataclass
class Pauses:
    """Collections of the garbage collector: how many, and seconds of the longest."""

    count: int = 0
    longest: float = 0.0
    _start: float = 0.0

    def note(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        else:
            self.count += 1
            self.longest = max(self.longest, time.perf_counter() - self._start)


@contextlib.contextmanager
def watched_gc() -> Iterator[Pauses]:
    """Record the pauses of the garbage collector, which runs as in production."""
    pauses = Pauses()
    gc.callbacks.append(pauses.note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(pauses.note)


def row(load: Load, steps: int) -> dict[str, Any]:
    """Return the figures of ``steps`` steps, in seconds."""
    server = without_device(load)
    steady = Steady(load, server)
    for seconds in (server.plan_seconds, server.commit_seconds, server.cpu_seconds):
        seconds.clear()
    with watched_gc() as pauses:
        for _ in range(steps):
            steady.step()
    plan, commit = np.asarray(server.plan_seconds), np.asarray(server.commit_seconds)
    return {
        "sequences": load.sequences,
        "waiting": load.waiting,
        "steps": steps,
        "plan": spread(plan),
        "commit": spread(commit),
        "step": spread(plan + commit),
        "cpu": spread(np.asarray(server.cpu_seconds)),
        "gc": {"collections": pauses.count, "longest": pauses.longest},
    }


def spread(seconds: np.ndarray) -> dict[str, float]:
    return {"median": float(np.median(seconds)), "p99": float(np.percentile(seconds, 99)), "max": float(seconds.max())}


def growth(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the exponent e in median ~ sequences^e, a log-log least-squares fit; None with fewer than two sizes."""
    sizes = np.log([item["sequences"] for item in rows])
    if len(set(sizes)) < 2:
        return None
    return float(np.polyfit(sizes, np.log([item["step"]["median"] for item in rows]), 1)[0])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a Markdown table: a line for each row, milliseconds."""
    heads = ["running", "waiting", "plan", "commit", "step median", "p99", "max"]
    heads += ["CPU median", "CPU p99", "us a sequence", "longest gc"]
    lines = [heads, ["---"] * len(heads), *map(_line, rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _line(item: Mapping[str, Any]) -> list[str]:
    step = item["step"]
    seconds = [item["plan"]["median"], item["commit"]["median"], step["median"], step["p99"], step["max"]]
    seconds += [item["cpu"]["median"], item["cpu"]["p99"]]
    return [
        str(item["sequences"]),
        str(item["waiting"]),
        *(f"{value * 1e3:.3f}" for value in seconds),
        f"{step['median'] * 1e6 / item['sequences']:.2f}",
        f"{item['gc']['longest'] * 1e3:.2f}",
    ]


def verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the verdicts on the goals that apply to these rows."""
    found: dict[str, tuple[float, float]] = {}
    medians = {(item["sequences"], item["waiting"]): item["step"]["median"] for item in rows}
    for item in rows:
        if item["sequences"] == GOAL_AT:
            name = f"{GOAL_AT} running, {item['waiting']} waiting"
            found[f"{name}: median"] = item["step"]["median"], MEDIAN_GOAL
            found[f"{name}: p99"] = item["step"]["p99"], P99_GOAL
    for waiting in {waiting for _, waiting in medians}:
        exponent = growth([item for item in rows if item["waiting"] == waiting])
        if exponent is not None:
            found[f"{waiting} waiting: growth exponent"] = exponent, GROWTH_GOAL
    waitings = sorted({waiting for _, waiting in medians})
    both = [n for n, w in medians if w == waitings[0] and (n, waitings[-1]) in medians]
    if len(waitings) > 1 and both:
        ratio = float(np.median([medians[n, waitings[-1]] / medians[n, waitings[0]] for n in both]))
        found[f"{waitings[-1]} over {waitings[0]} waiting"] = ratio, WAITING_GOAL
    return {name: {"figure": a, "goal": b, "reached": a <= b} for name, (a, b) in found.items()}


def summary(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {item['figure']:.3g}, goal at most {item['goal']:g}: {'reached' if item['reached'] else 'MISSED'}"
        for name, item in result["verdicts"].items()
    ]
