"""Command-line options of ``jaxinfer bench latency`` and ``jaxinfer bench throughput``."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence

from jaxinfer.bench.names import OFFLINE_ALWAYS, OptionsError, add_lengths, take_lengths
from jaxinfer.bench.options import DEFAULT_REQUESTS, add_dataset, count, not_negative
from jaxinfer.cli.engine import add_engine, engine_settings
from jaxinfer.cli.flags import all_flags
from jaxinfer.cli.parser import Parser

WORK = "jaxinfer.bench.offline"
JAXINFER, TRANSFORMERS = "jaxinfer", "transformers"
_BACKENDS: Mapping[str, str] = {"vllm": JAXINFER, "hf": TRANSFORMERS}
COMMANDS: Mapping[str, str] = {
    "latency": "Measure the time of a batch of requests, by the engine in this process (docs/load_testing.md).",
    "throughput": "Measure requests and tokens a second, of requests that all are there at the start, by the engine in "
    "this process (docs/load_testing.md).",
}
_COMMON = (
    "batch_size",
    "num_requests",
    "input_len",
    "output_len",
    "dataset",
    "iterations",
    "warmup",
    "out",
    "compare",
    "backend",
)
_EXAMPLES: Mapping[str, Sequence[str]] = {
    "latency": (
        "jaxinfer bench latency demo --batch-size 4 --input-len 64 --output-len 32",
        "jaxinfer bench latency path/to/model --out before.json",
        "jaxinfer bench latency path/to/model --compare before.json --kv-cache-dtype fp8",
    ),
    "throughput": (
        "jaxinfer bench throughput demo --num-requests 100",
        "jaxinfer bench throughput path/to/model --dataset sharegpt --dataset-path FILE.json --out after.json",
        "jaxinfer bench throughput demo --backend transformers",
    ),
}
_REQUESTS = {"latency": 8, "throughput": DEFAULT_REQUESTS}
_ITERATIONS, _WARMUP = {"latency": 30, "throughput": 1}, {"latency": 10, "throughput": 1}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options of the command that is the first word. ``settings``: the given engine settings; ``requests``:
    those of an iteration."""
    command = words[0]
    parser = make_parser(command)
    options: argparse.Namespace = parser.parse_args(words[1:])
    parser.take_model(options)
    options.command, options.work = command, WORK
    options.settings = engine_settings(parser, options)
    options.requests = options.batch_size if command == "latency" else options.num_requests
    options.backends = list(dict.fromkeys([JAXINFER, _BACKENDS.get(options.backend, options.backend)]))
    try:
        take_lengths(options)
    except OptionsError as error:
        parser.refuse(str(error))
    return options


def make_parser(command: str) -> Parser:
    """Return the parser of a command of `COMMANDS`."""
    parser = Parser(f"jaxinfer bench {command}", COMMANDS[command], _EXAMPLES[command], _COMMON)
    load = parser.add_argument_group("load")
    if command == "latency":
        load.add_argument("--batch-size", type=count, default=_REQUESTS[command], help="requests of an iteration")
    else:
        number = "requests of an iteration"
        load.add_argument(*all_flags("num_requests"), type=count, default=_REQUESTS[command], help=number)
    measured = "measured iterations, each with new prompts"
    load.add_argument(*all_flags("iterations"), type=count, default=_ITERATIONS[command], help=measured)
    unmeasured = "iterations of at most 16 requests before them"
    load.add_argument(*all_flags("warmup"), type=_whole, default=_WARMUP[command], help=unmeasured)
    load.add_argument(*all_flags("seed"), type=int, default=0, help="seed of prompts and sampling")
    load.add_argument("--temperature", type=not_negative, default=0.0, help="sampling temperature; 0: greedy")
    add_dataset(parser)
    add_lengths(parser)
    _report(parser)
    add_engine(parser, "the default of the engine")
    parser.accept_always(OFFLINE_ALWAYS)
    return parser


def _report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument(*all_flags("out"), type=pathlib.Path, help="JSON file: settings, versions and statistics")
    earlier = "JSON file of an earlier --out: print the ratio of each figure to its own"
    group.add_argument("--compare", type=pathlib.Path, metavar="FILE", help=earlier)
    both = "transformers: measure Hugging Face's library, too, in turns with jaxinfer, iteration by iteration"
    group.add_argument(
        "--backend", choices=(JAXINFER, TRANSFORMERS, *_BACKENDS), default=JAXINFER, metavar="NAME", help=both
    )
    python = "Python that has torch and transformers (default: this one)"
    group.add_argument("--transformers-python", default=sys.executable, metavar="PATH", help=python)
    rows = "prompts of one generate() of transformers, which computes them in step (default: 16)"
    group.add_argument(*all_flags("transformers_batch_size"), type=count, default=16, help=rows)


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value
