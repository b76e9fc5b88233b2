"""Command-line options of ``jaxinfer bench serve``."""

from __future__ import annotations

import argparse
import math
import pathlib
import urllib.parse
from collections.abc import Sequence

from jaxinfer.bench.datasets import DATASETS, DEFAULT_LENGTHS, Lengths
from jaxinfer.bench.figures import MS, Goals
from jaxinfer.bench.http_target import PATHS
from jaxinfer.bench.names import ALWAYS, OptionsError, add_others, take_others
from jaxinfer.bench.traces import MOONCAKE_BLOCK
from jaxinfer.cli.flags import all_flags
from jaxinfer.cli.parser import Parser

SCHEMES = ("grpc", "grpcs", "http", "https")
DEFAULT_REQUESTS, DEFAULT_USERS, DEFAULT_SWEEP_SECONDS = 200, 8, 20.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options; conflicting ones end the command with one sentence, as the parser's own errors do."""
    parser = make_parser()
    options: argparse.Namespace = parser.parse_args(arguments)
    try:
        take_others(options)
        _check(options)
    except OptionsError as error:
        parser.refuse(str(error))
    return options


def make_parser() -> Parser:
    """Return the parser."""
    parser = Parser("jaxinfer bench", _DESCRIPTION, _EXAMPLES, _COMMON)
    what = "benchmark a running server; latency and throughput have options of their own, and measure an engine"
    parser.add_argument("command", nargs="?", choices=("serve",), metavar="serve", help=what)
    for add in (_target, _load, _sweep, add_dataset, _report, add_others):
        add(parser)
    parser.accept_always(ALWAYS)
    return parser


_COMMON = ("target", "concurrency", "request_rate", "num_requests", "duration", "sweep", "goodput", "out", "plot")
_EXAMPLES = (
    "jaxinfer bench serve --target grpc://localhost:50051 --concurrency 16 --num-requests 500",
    "jaxinfer bench serve --target http://localhost:8000 --sweep --goodput ttft:200 tpot:50 --plot knee.png",
)
_DESCRIPTION = "Send load to a server and report user-visible latencies and throughput (docs/load_testing.md)."


def _target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        *all_flags("target"), type=_url, help="server: grpc://HOST:PORT, http://HOST:PORT, grpcs:// or https://"
    )
    group.add_argument("--model", help="model name in requests (default: the served model)")
    paths = {f"/v1{path}": name for name, path in PATHS.items()}
    group.add_argument(
        "--endpoint",
        type=lambda text: paths.get(text, text),
        choices=sorted(PATHS),
        help="HTTP endpoint (default: completions)",
    )
    group.add_argument("--api-key-file", type=pathlib.Path, help="file whose first line is the API key")
    group.add_argument("--ca-file", type=pathlib.Path, help="PEM file of trusted CAs, for TLS")
    group.add_argument("--connections", type=count, default=8, help="gRPC connections, used in turn")
    group.add_argument(
        "--metrics",
        type=_http,
        metavar="URL",
        help="Prometheus metrics of the server (default: /metrics of an HTTP target)",
    )
    group.add_argument("--timeout", type=_positive, default=600.0, help="time limit of a request in seconds")
    group.add_argument("--vocab-size", type=count, help="over HTTP: send random token ids below it, not words")
    group.add_argument("--temperature", type=not_negative, default=0.0, help="sampling temperature; 0: greedy")


def _load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--request-rate", type=_positive, help="open loop: requests per second; inf: all at once")
    users = f"closed loop: concurrent users (default: {DEFAULT_USERS})"
    group.add_argument(*all_flags("concurrency"), type=count, help=users)
    group.add_argument("--speed", type=_positive, help="open loop: speedup of a trace's arrivals")
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        help="shape of the gamma distributed gaps; 1: Poisson, below: bursts, inf: even",
    )
    number = f"requests to send (default: {DEFAULT_REQUESTS}, without --duration)"
    group.add_argument(*all_flags("num_requests"), type=count, help=number)
    group.add_argument("--duration", type=_positive, help="seconds during which requests are started")
    group.add_argument(*all_flags("warmup"), type=int, default=0, help="warmup requests, not measured")
    group.add_argument("--seed", type=int, default=0, help="seed of arrivals, prompts and sampling")


def _sweep(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sweep")
    group.add_argument("--sweep", action="store_true", help="search for the highest sustainable rate")
    group.add_argument("--sweep-precision", type=_positive, default=0.1, help="relative precision of the rate")
    group.add_argument(
        "--sweep-max-rate",
        type=_positive,
        default=65536.0,
        help="highest rate to try, in requests per second",
    )
    group.add_argument(
        "--good-share",
        type=_positive,
        default=0.9,
        help="minimum fraction of requests within --goodput",
    )
    group.add_argument("--keep-up", type=_positive, default=0.9, help="minimum completion rate / arrival rate")


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the requests: `jaxinfer.bench.datasets.Asked`."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        *all_flags("dataset"), choices=sorted(DATASETS), default="random", help="data set of the requests"
    )
    group.add_argument("--dataset-path", type=pathlib.Path, help="file of the data set, if it is read from a file")
    group.add_argument(
        *all_flags("input_len"),
        type=_lengths,
        default=DEFAULT_LENGTHS,
        metavar="N|LOW:HIGH",
        help="prompt tokens, after a shared prefix",
    )
    group.add_argument(
        *all_flags("output_len"),
        type=_lengths,
        metavar="N|LOW:HIGH",
        help=f"output tokens (default: {DEFAULT_LENGTHS}, or the data set's)",
    )
    group.add_argument(
        *all_flags("prefix_len"),
        type=_tokens,
        default=0,
        help="shared-prefix, sonnet: tokens of the prefix",
    )
    group.add_argument("--groups", type=count, default=1, help="shared-prefix: number of prefixes")
    group.add_argument("--scale", type=_positive, help="azure: factor of lengths (default: the longest fits)")
    group.add_argument(
        "--block-tokens",
        type=count,
        default=MOONCAKE_BLOCK,
        help="mooncake: tokens per block",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate exactly the requested length (default: on, except for sharegpt)",
    )


def _report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="latency goals: ttft:200 tpot:50 e2e:5000"
    )
    group.add_argument(*all_flags("out"), type=pathlib.Path, help="JSON lines file: settings, each request, statistics")
    group.add_argument("--plot", type=pathlib.Path, help="PNG file: latencies and throughput over the rate")
    group.add_argument("--max-lateness", type=_positive, default=10.0, help="maximum p99 delay of sends in ms")
    group.add_argument("--max-lag", type=_positive, default=10.0, help="maximum p99 event loop lag in ms")
    group.add_argument(
        "--self-test", action="store_true", help="measure the load generator, with a server of known latencies"
    )


def _url(text: str) -> str:
    url = urllib.parse.urlsplit(text)
    try:
        fine = url.scheme in SCHEMES and url.hostname and (url.port is None or url.port > 0)
    except ValueError:
        fine = False
    if not fine:
        raise argparse.ArgumentTypeError(f"{text!r} is not grpc://HOST:PORT, http://HOST:PORT, grpcs:// or https://")
    return text


def _http(text: str) -> str:
    """Return the URL of a metrics page; for a URL without path, its /metrics."""
    if not text.startswith("http"):
        raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT/metrics")
    url = urllib.parse.urlsplit(_url(text))
    return url._replace(path="/metrics").geturl() if url.path in ("", "/") else text


def _positive(text: str) -> float:
    value = not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def not_negative(text: str) -> float:
    """Parse a number that is 0 or more."""
    value = float(text)
    if math.isnan(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def count(text: str) -> int:
    """Parse a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _tokens(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _lengths(text: str) -> Lengths:
    low, _, high = text.partition(":")
    found = Lengths(count(low), count(high or low))
    if found.low > found.high:
        raise argparse.ArgumentTypeError(f"{text}: {found.low} is above {found.high}")
    return found


def goals(words: Sequence[str]) -> Goals:
    """Parse goals such as ``ttft:200``, in milliseconds.

    Raises:
        OptionsError: one is invalid.
    """
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            found[name] = float(value) / MS
        except ValueError:
            found[name] = math.nan
        if name not in ("ttft", "tpot", "e2e") or not found[name] > 0:
            raise OptionsError(f"--goodput {word}: not one of ttft:MS, tpot:MS, e2e:MS")
    return Goals(**found)


def _check(options: argparse.Namespace) -> None:
    goals(options.goodput)
    loads = [name for name in ("request_rate", "concurrency", "speed") if getattr(options, name)]
    if len(loads) > 1:
        raise OptionsError(" and ".join(f"--{name.replace('_', '-')}" for name in loads) + " exclude each other")
    if options.target is None and not options.self_test:
        raise OptionsError("--target is missing: where is the server?")
    if options.sweep and (options.concurrency or options.speed):
        raise OptionsError("--sweep tries rates: --concurrency and --speed have none")
    if options.speed and options.dataset not in ("azure", "mooncake"):
        raise OptionsError(f"--speed needs arrival times, and the {options.dataset} data set has none")
    if options.request_rate == math.inf and (options.sweep or not options.num_requests):
        raise OptionsError("--request-rate inf needs --num-requests and no --sweep")
