"""Two ways to serve the same requests, in turns, in one process: the gain of one over the other."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers.measure import Spread, ratios
from benchmarks.traces.ideal import BatchingBound, lru_hits, unique_pages
from benchmarks.traces.replay import Arrival, Replayed, Server, arrivals, replay
from jaxinfer.bench.traces import Trace, TraceError
from jaxinfer.config import EngineConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request


@dataclasses.dataclass(frozen=True)
class Setup:
    """Common settings of all comparisons.

    Attributes:
        open: function that returns a server, ready to serve.
        seed: seed of the prompts' tokens in the first round; each round has its own.
        speed, outstanding: see `replay`.
        pool_share: share of the trace's unique tokens that the pool holds, for `against_lru`.
        prefix_len: shared tokens, for `warm_prefix`.
    """

    trace: Trace
    open: Callable[[EngineConfig], Server]
    config: EngineConfig
    vocab: int
    rounds: int
    seed: int
    speed: float | None
    outstanding: int | None
    pool_share: float = 0.25
    prefix_len: int = 1024


@dataclasses.dataclass(frozen=True)
class Goal:
    """Goal of a figure: at least ``value``, or at most."""

    value: float
    at_least: bool = True

    def judge(self, figure: float) -> dict[str, Any]:
        reached = figure >= self.value if self.at_least else figure <= self.value
        return {"figure": figure, "goal": self.value, "at_least": self.at_least, "reached": reached}


def static_batching(setup: Setup) -> dict[str, Any]:
    """Compare continuous with static batching, as a share of the gain that the lengths allow. Prompts cost the same in
    both; serving the prompts alone yields the ratio without them."""
    servers = _open(setup, {"continuous": {"batching": "continuous"}, "static": {"batching": "static"}})
    requests = tuple(dataclasses.replace(request, output_len=1) for request in setup.trace.requests)
    prompts = Way(servers["continuous"], dataclasses.replace(setup.trace, requests=requests), seed=_OTHER_PROMPTS)
    ways = {name: Way(server, setup.trace) for name, server in servers.items()}
    runs = _turns(setup, ways | {"prompts alone": prompts}, setup.outstanding)
    slots = setup.config.max_num_seqs
    assert slots is not None  # set by `benchmarks.trace`
    bound = BatchingBound.of([request.output_len for request in setup.trace.requests], slots)
    ratio, decoding = _ratio(runs["continuous"], runs["static"]), _decoding_ratio(runs)
    return {
        "ratio": dataclasses.asdict(ratio),
        "runs": _figures(runs),
        "bound": bound.ratio,
        "bound_of_a_run_that_ends": bound.ratio_here,
        "share_of_a_run_that_ends": ratio.median / bound.ratio_here,
        "decoding_ratio": decoding,
        "decoding_share": decoding / bound.ratio,
        "steps_ratio": runs["static"][0].steps / runs["continuous"][0].steps,
        "verdict": Goal(0.85).judge(ratio.median / bound.ratio),
    }


def _decoding_ratio(runs: Mapping[str, list[Replayed]]) -> float:
    """Return the seconds of static over continuous batching, each less the seconds of the prompts."""
    rounds = zip(runs["continuous"], runs["static"], runs["prompts alone"], strict=True)
    return statistics.median((b.seconds - p.seconds) / (a.seconds - p.seconds) for a, b, p in rounds)


def exactness(setup: Setup) -> dict[str, Any]:
    """Compare relaxed with exact mode: the cost of batch invariance."""
    record = in_turns(setup, {"relaxed": {"exactness": "relaxed"}, "exact": {"exactness": "exact"}})
    return record | {"verdict": Goal(1.10, at_least=False).judge(record["ratio"]["median"])}


def async_scheduling(setup: Setup) -> dict[str, Any]:
    """Compare launching step N+1 before the results of step N are read with reading first."""
    return in_turns(setup, {"on": {"async_scheduling": True}, "off": {"async_scheduling": False}})


def multi_step(setup: Setup) -> dict[str, Any]:
    """Compare several decode steps per launch with one. Requests at once are limited to the slots: none waits."""
    steps = setup.config.multi_step if setup.config.multi_step > 1 else 8
    changes = {f"{steps} steps": {"multi_step": steps}, "1 step": {"multi_step": 1}}
    return in_turns(setup, changes, outstanding=setup.config.max_num_seqs)


def in_turns(
    setup: Setup, changes: Mapping[str, Mapping[str, Any]], *, outstanding: int | None = None
) -> dict[str, Any]:
    """Run two servers in turns; the ratio of their output tokens a second is taken round by round.

    Args:
        changes: settings of the two servers; the rate of the first is divided by that of the second.
    """
    ways = {name: Way(server, setup.trace) for name, server in _open(setup, changes).items()}
    runs = _turns(setup, ways, outstanding or setup.outstanding)
    return {"ratio": dataclasses.asdict(_ratio(*runs.values())), "runs": _figures(runs)}


class Way(NamedTuple):
    """Participant of each round: a server, and its trace."""

    server: Server
    trace: Trace
    seed: int = 0  # seed of its prompts; equal seeds give equal prompts


_OTHER_PROMPTS = 1 << 20  # a seed that no round reaches


def _open(setup: Setup, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Server]:
    return {name: setup.open(dataclasses.replace(setup.config, **change)) for name, change in changes.items()}


def _turns(setup: Setup, ways: Mapping[str, Way], outstanding: int | None) -> dict[str, list[Replayed]]:
    """Run rounds with new prompts, every other round in reversed order."""
    runs: dict[str, list[Replayed]] = {name: [] for name in ways}
    for number in range(setup.rounds):
        for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
            way = ways[name]
            incoming = arrivals(way.trace, setup.vocab, setup.seed + way.seed + number, setup.speed)
            runs[name].append(replay(way.server, incoming, outstanding=outstanding))
    return runs


def _ratio(first: list[Replayed], second: list[Replayed]) -> Spread:
    return ratios([run.rate for run in first], [run.rate for run in second])


def _figures(runs: Mapping[str, list[Replayed]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [run.figures() for run in each] for name, each in runs.items()}


def against_lru(setup: Setup) -> dict[str, Any]:
    """Compare prefix hits, with a pool of a share of the trace's unique tokens, to an LRU cache of that size that
    serves one prompt after the other.

    Raises:
        TraceError: the prompts share no page.
    """
    trace, page = setup.trace, setup.config.page_size
    unique = unique_pages(trace, page)
    pages = max(int(unique * setup.pool_share), 1)
    ideal, unlimited = lru_hits(trace, page, pages), lru_hits(trace, page, unique)
    if not ideal.hits:
        raise TraceError(f"the prompts of the {trace.name} trace share no page: nothing to compare")
    server = setup.open(dataclasses.replace(setup.config, num_pages=pages, swap_space_gib=0.0))
    runs = _turns(dataclasses.replace(setup, rounds=1), {"served": Way(server, trace)}, setup.outstanding)
    return {
        "unique_pages": unique,
        "pool_pages": pages,
        "lru": dataclasses.asdict(ideal) | {"rate": ideal.rate},
        "lru_without_limit": dataclasses.asdict(unlimited) | {"rate": unlimited.rate},
        "runs": _figures(runs),
        "verdict": Goal(0.90).judge(runs["served"][0].counters.hits / ideal.hits),
    }


def warm_prefix(setup: Setup) -> dict[str, Any]:
    """Compare the TTFT of a prompt with a new prefix to that with a cached prefix. One request at a time."""
    server = setup.open(setup.config)
    rng = np.random.default_rng(setup.seed)
    cold: list[float] = []
    warm: list[float] = []
    for number in range(setup.rounds + 1):  # the first round warms up everything except the prefix cache
        prefix = rng.integers(setup.vocab, size=setup.prefix_len)
        for kind, times in (("cold", cold), ("warm", warm)):
            prompt = np.concatenate([prefix, rng.integers(setup.vocab, size=16)])
            times.append(_ttft(server, f"{kind}-{number}", prompt))
    spread = ratios(cold[1:], warm[1:])
    return {
        "prefix_len": setup.prefix_len,
        "ttft": {"cold": statistics.median(cold[1:]), "warm": statistics.median(warm[1:])},
        "ratio": dataclasses.asdict(spread),
        "verdict": Goal(5.0).judge(spread.median),
    }


def _ttft(server: Server, name: str, prompt: np.ndarray) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, seed=0)
    request = Request(name, tuple(prompt.tolist()), params)
    return replay(server, [Arrival(0.0, lambda: request)]).times[0].ttft


MODES: Mapping[str, Callable[[Setup], dict[str, Any]]] = {
    "static": static_batching,
    "cache": against_lru,
    "prefix": warm_prefix,
    "exactness": exactness,
    "async": async_scheduling,
    "multi-step": multi_step,
}


def plain(setup: Setup) -> dict[str, Any]:
    """Serve the trace unchanged, round by round."""
    runs = _turns(setup, {"served": Way(setup.open(setup.config), setup.trace)}, setup.outstanding)
    return {"rate": dataclasses.asdict(Spread.of([run.rate for run in runs["served"]])), "runs": _figures(runs)}
