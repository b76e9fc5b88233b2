"""Record of a run: environment, options, figures, and reasons to doubt them."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.peers import machine
from benchmarks.traces import replay
from benchmarks.traces.compare import Setup

OTHERS_MAY_USE = 0.03  # share of the machine, while figures are taken
METHOD = {
    "ttft": "from when a request was due (or could enter, where their number is limited) to its first token",
    "tpot": "from the first to the last token of a request, over the tokens after the first",
    "kv_waste": "of the running sequences, over all steps: 1 - tokens that have keys / tokens that their pages hold",
    "prefix_hit_rate": "prompt tokens found in the cache / prompt tokens looked up",
    "ratio": "output tokens a second of the first way / of the second, round by round; the median counts",
}


class Quiet:
    """Measure the share of the machine that other programs use from now on: all but this process and its children that
    have ended."""

    def __init__(self) -> None:
        self._start, self._busy, self._own_busy = time.monotonic(), machine.busy_seconds(), _own_seconds()

    def others(self, cores: int) -> float:
        used = (machine.busy_seconds() - self._busy) - (_own_seconds() - self._own_busy)
        return max(0.0, used / (time.monotonic() - self._start) / cores)


def _own_seconds() -> float:
    return sum(os.times()[:4])


def base(options: argparse.Namespace, threads: int, others: float) -> dict[str, Any]:
    """Describe a run: date, machine, versions and options."""
    plain = {name: value for name, value in vars(options).items() if not isinstance(value, pathlib.Path)}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(threads) | {"used_by_others": others},
        "versions": {name: importlib.metadata.version(name) for name in ("jaxinfer", "jax", "jaxlib", "numpy")},
        "options": plain,
    }


def header(options: argparse.Namespace, setup: Setup, others: float) -> dict[str, Any]:
    """Return a trace's record without the figures."""
    trace = setup.trace
    described = {
        "name": trace.name,
        "requests": len(trace.requests),
        "dropped": trace.dropped,
        "scale": trace.scale,
        "block_tokens": trace.block_tokens,
        "longest": trace.longest,
    }
    return base(options, options.threads, others) | {
        "method": METHOD,
        "trace": described,
        "outstanding": setup.outstanding,
    }


def doubts(result: Mapping[str, Any]) -> list[str]:
    """Return the reasons to doubt the figures. Simulated time is independent of other programs."""
    others = result["machine"]["used_by_others"]
    if result["options"].get("model") == "none" or others <= OTHERS_MAY_USE:
        return []
    return [f"NOT QUIET: other programs used {others:.0%} of the machine; measure again when it is idle"]


def describe(result: Mapping[str, Any]) -> str:
    """Format the printed text of a result."""
    trace = result["trace"]
    lines = [
        f"{trace['name']}: {trace['requests']} requests of at most {trace['longest']} tokens, lengths times "
        f"{trace['scale']:.4g}, {trace['dropped']} too long"
    ]
    for name, runs in result.get("runs", {}).items():
        lines += ["", f"-- {name}: median of {len(runs)} by throughput", replay.describe(_median_run(runs))]
    lines += ["", *_comparison(result), *doubts(result)]
    return "\n".join(lines)


def _median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return sorted(runs, key=lambda run: run["output_tokens_per_second"])[len(runs) // 2]


def _comparison(result: Mapping[str, Any]) -> list[str]:
    """Format the figures of a comparison, one a line: numbers and short lists of numbers."""
    names = (
        "bound",
        "bound_of_a_run_that_ends",
        "share_of_a_run_that_ends",
        "steps_ratio",
        "decoding_ratio",
        "decoding_share",
        "unique_pages",
        "pool_pages",
    )
    lines = [f"{name.replace('_', ' ')}: {result[name]:.4g}" for name in names if name in result]
    for name in ("lru", "lru_without_limit"):
        if name in result:
            lines.append(f"{name.replace('_', ' ')}: {result[name]['hits']} hits, {result[name]['rate']:.2%}")
    if "ttft" in result:
        lines.append(f"TTFT cold {result['ttft']['cold'] * 1e3:.1f} ms, warm {result['ttft']['warm'] * 1e3:.1f} ms")
    if "ratio" in result:
        ratio = result["ratio"]
        lines.append(f"ratio: {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})")
    if "verdict" in result:
        verdict, word = result["verdict"], "at least" if result["verdict"]["at_least"] else "at most"
        reached = "reached" if verdict["reached"] else "MISSED"
        lines.append(f"{verdict['figure']:.3f}, goal {word} {verdict['goal']:g}: {reached}")
    return lines


def default_path(result: Mapping[str, Any], folder: pathlib.Path) -> pathlib.Path | None:
    """Return the default file of a record; None if the figures are doubtful, or of only a subset of the trace."""
    options = result["options"]
    if doubts(result) or options["requests"] is not None:
        return None
    words = ("trace", options["trace"], options["compare"] or "replay", pathlib.Path(options["model"]).name)
    seqs = f"{options['max_num_seqs']}-seqs"
    name = "-".join(machine.slug(word) for word in (*words, seqs, result["machine"]["cpu"]))
    return folder / f"{name}-{result['date'][:10]}.json"


def keep(result: Mapping[str, Any], path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
