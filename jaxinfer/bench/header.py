"""Header of a report: server, requests, load and date, which make its figures comparable."""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import time

from jaxinfer.bench.datasets import DATASETS, DEFAULT_LENGTHS, Lengths
from jaxinfer.bench.load import Load
from jaxinfer.bench.target import Served


def header(options: argparse.Namespace, served: Served, load: Load) -> dict[str, str]:
    """Return the lines of the header by name. The date is the current time, in UTC."""
    version = f"version {served.version}" if served.version else "which does not tell its version"
    found = {
        "server": f"{options.target}: {served.model}, {version}",
        "requests": _requests(options),
        "load": _load(options, load),
    }
    if options.goodput:
        share = f", {options.good_share:.0%} of requests" if options.sweep else ""
        found["goals"] = ", ".join(f"{word.replace(':', ' ')} ms" for word in options.goodput) + share
    return found | {
        "date": f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, "
        f"jaxinfer.bench {importlib.metadata.version('jaxinfer')}"
    }


def _requests(options: argparse.Namespace) -> str:
    dataset = DATASETS[options.dataset]
    parts = [options.dataset if options.dataset_path is None else f"{options.dataset} ({options.dataset_path.name})"]
    if options.dataset in ("shared-prefix", "sonnet"):
        parts.append(f"prefixes of {options.prefix_len}")
    if dataset.lengths_given:
        parts.append(f"{_tokens(options.input_len)} tokens in, {_tokens(options.output_len or DEFAULT_LENGTHS)} out")
    return ", ".join((*parts, f"temperature {options.temperature:g}", f"seed {options.seed}"))


def _tokens(lengths: Lengths) -> str:
    return str(lengths.low) if lengths.low == lengths.high else f"{lengths.low} to {lengths.high}"


def _load(options: argparse.Namespace, load: Load) -> str:
    parts = [_arrivals(options, load)]
    if load.requests is not None:
        parts.append(f"{load.requests} requests" + (" a rate" if options.sweep else ""))
    if load.duration is not None:
        parts.append(f"{load.duration:g} s" + (" a rate" if options.sweep else ""))
    return ", ".join(parts)


def _arrivals(options: argparse.Namespace, load: Load) -> str:
    if load.users is not None:
        return f"closed loop of {load.users} users"
    if load.speed is not None:
        return f"open loop, the trace's arrivals at {load.speed:g} times their speed"
    if load.rate == math.inf:
        return "open loop, all at once"
    shape = "Poisson" if load.burstiness == 1 else f"burstiness {load.burstiness:g}"
    return f"open loop, {'a sweep from ' if options.sweep else ''}{load.rate:g} requests/s, {shape}"
