"""Options of the benchmarks of vLLM and SGLang, as options of ``jaxinfer bench serve``."""

from __future__ import annotations

import argparse
import math
import pathlib
from collections.abc import Mapping

from jaxinfer.bench.datasets import Lengths
from jaxinfer.config.aliases import Always

_FROM_THE_SERVER = "prompts are made of token ids or words that the server knows"
_ALL = "all latencies are reported, at all percentiles"
ALWAYS: Mapping[str, Always] = {
    "disable_tqdm": Always("true", "progress is shown at a terminal only"),
    "trust_remote_code": Always("true|false", "no code of a checkpoint is ever run"),
    "tokenizer": Always(".*", _FROM_THE_SERVER),
    "percentile_metrics": Always(".*", _ALL),
    "selected_percentiles": Always(".*", _ALL),
    "metric_percentiles": Always(".*", _ALL),
    "save_detailed": Always("true", "each request is in --out"),
    "ready_check_timeout_sec": Always(r"\d+", "a server that is not there is an error at once"),
}
"""Options that are always so here."""

OFFLINE_ALWAYS: Mapping[str, Always] = {
    "disable_tqdm": ALWAYS["disable_tqdm"],
    "n": Always("1", "a request has one output: more requests have more"),
    "use_beam_search": Always("false", "there is no beam search: n and best_of sample"),
    "async_engine": Always("true|false", "there is one engine, and AsyncLLM is made of it"),
    "disable_detokenize": Always("false", "outputs are measured as users get them, with their text"),
    "tokenizer": Always(".*", "prompts are token ids"),
    "profile": Always("false", "a server takes profiles: jaxinfer serve --profile DIR"),
}
"""Options of vLLM's offline benchmarks that are always so here."""

_BACKENDS: Mapping[str, str] = {
    "vllm": "completions",
    "openai": "completions",
    "sglang": "completions",
    "sglang-oai": "completions",
    "vllm-chat": "chat",
    "openai-chat": "chat",
    "sglang-oai-chat": "chat",
}
_RESULTS = "bench.jsonl"


class OptionsError(ValueError):
    """Conflicting options. The message names them."""


def add_others(parser: argparse.ArgumentParser) -> None:
    """Add the options that `take_others` turns into ours; the help does not show them."""
    hidden = argparse.SUPPRESS
    parser.add_argument("--backend", "--endpoint-type", choices=sorted(_BACKENDS), help=hidden)
    parser.add_argument("--host", help=hidden)
    parser.add_argument("--port", type=int, help=hidden)
    add_lengths(parser)
    parser.add_argument("--save-result", action="store_true", help=hidden)
    parser.add_argument("--result-dir", type=pathlib.Path, help=hidden)


def take_others(options: argparse.Namespace) -> None:
    """Set our options from those of `add_others`.

    Raises:
        OptionsError: they conflict with ours.
    """
    options.endpoint = options.endpoint or _BACKENDS.get(options.backend, "completions")
    if options.host or options.port:
        if options.target is not None:
            raise OptionsError(f"--target {options.target} and --host or --port are two: name one")
        options.target = f"http://{options.host or '127.0.0.1'}:{options.port or 8000}"
    if options.concurrency and options.request_rate == math.inf:
        options.request_rate = None  # no other bound than the users
    take_lengths(options)
    if options.save_result or options.result_dir is not None:
        options.out = (options.result_dir or pathlib.Path()) / (options.out or _RESULTS)


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """Add the options of `take_lengths`."""
    parser.add_argument("--random-range-ratio", type=float, help=argparse.SUPPRESS)


def take_lengths(options: argparse.Namespace) -> None:
    """Set data set and lengths from names of other benchmarks: a prefix of random prompts, and a range around lengths.

    Raises:
        OptionsError: a value is invalid.
    """
    if options.prefix_len and options.dataset == "random":
        options.dataset = "shared-prefix"
    if (ratio := options.random_range_ratio) is not None:
        if not 0 <= ratio < 1:
            raise OptionsError(f"--random-range-ratio {ratio:g} must be at least 0 and below 1")
        for name in ("input_len", "output_len"):
            setattr(options, name, _around(getattr(options, name), ratio))


def _around(lengths: Lengths | None, ratio: float) -> Lengths | None:
    if lengths is None:
        return None
    return Lengths(max(1, math.floor(lengths.low * (1 - ratio))), math.ceil(lengths.high * (1 + ratio)))
