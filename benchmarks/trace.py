"""Production traces on jaxinfer: throughput, latencies, KV waste, prefix hits; and gains of serving options.

    python benchmarks/trace.py azure                                     replay at once, as fast as possible
    python benchmarks/trace.py azure --speed 20                          arrivals as recorded, 20 times as fast
    python benchmarks/trace.py azure --compare static --every 20         continuous and static batching, in turns
    python benchmarks/trace.py mooncake --compare cache                  prefix hits against an LRU simulation
    python benchmarks/trace.py mooncake --compare cache --model none     the same at the recorded lengths, no model

See docs/benchmarks.md for what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.peers import machine
from benchmarks.traces import record
from benchmarks.traces.compare import MODES, Setup, plain
from benchmarks.traces.fake import FakeServer, resolved
from benchmarks.traces.real import RealServer
from jaxinfer.bench.traces import (
    MOONCAKE_BLOCK,
    Trace,
    TraceError,
    read_azure,
    read_mooncake,
    scale_azure,
    scale_mooncake,
)
from jaxinfer.compilations import use_compilation_cache
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.loading import load_model

REPO = pathlib.Path(__file__).resolve().parent.parent
FILES = {"azure": "azure_2023_conv.csv", "mooncake": "mooncake_synthetic.jsonl"}
RESULTS = REPO / "benchmarks" / "results"
NO_MODEL = "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0, or 2 with a message when it cannot measure."""
    options = parse(arguments)
    try:
        result = measure(options)
    except (TraceError, EngineConfigError) as cause:
        print(f"trace: {cause}", file=sys.stderr)
        return 2
    print(record.describe(result))
    out = options.out or record.default_path(result, RESULTS)
    if out is not None:
        record.keep(result, out)
        print(f"kept in {out}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("trace", choices=sorted(FILES))
    add("--compare", choices=sorted(MODES), help="two ways to serve it, in turns (default: serve it as it is)")
    add("--model", default="demo", help="demo, a folder, or none: scheduler and pages alone, time by a formula")
    add("--dtype", default="float32", help="of the model (default float32)")
    add("--traces", type=pathlib.Path, default=_folder(), help="folder of the files")
    add("--every", type=int, default=1, help="each so many-th request of the file (default 1)")
    add("--requests", type=int, help="the first so many of those (default: all)")
    add("--scale", type=float, help="azure: lengths times this (default: so that the longest fits)")
    add("--block-tokens", type=int, help="mooncake: tokens of a block (default: 16; with --model none 512)")
    add("--speed", type=float, help="arrivals so many times as fast as recorded (default: all at once)")
    add("--outstanding", type=int, help="requests in the engine at once (default: 4 * max_num_seqs without --speed)")
    add("--rounds", type=int, default=1, help="times that each way has its turn (default 1)")
    add("--max-num-seqs", type=int, default=8, help="sequences that run together (default 8)")
    add("--max-model-len", type=int, help="longest prompt plus output (default: the model's; none: the trace's)")
    add("--page-size", type=int, default=16, help="tokens of a page (default 16)")
    add("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="any field of EngineConfig")
    add("--pool-share", type=float, default=0.25, help="--compare cache: of the unique tokens (default 0.25)")
    add("--prefix-len", type=int, default=1024, help="--compare prefix: shared tokens (default 1024)")
    add("--seed", type=int, default=0, help="of the prompts' tokens")
    add("--threads", type=int, default=len(machine.usable_cores()), help="cores (default: all)")
    add("--out", type=pathlib.Path, help="JSON file (default: in benchmarks/results, if the run can be believed)")
    return parser.parse_args(arguments)


def _folder() -> pathlib.Path:
    folder = os.environ.get("JAXINFER_TEST_DATA")
    return (pathlib.Path(folder) if folder else REPO.parent / "shared" / "data") / "traces"


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    try:
        found = json.loads(value)
    except json.JSONDecodeError:
        return name, value
    return name, tuple(found) if isinstance(found, list) else found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure according to the options; return one record.

    Raises:
        TraceError: the trace is absent, or none of its requests fits.
        EngineConfigError: the engine settings are invalid.
    """
    machine.keep_to_cores(options.threads)
    setup = _without_model(options) if options.model == NO_MODEL else _with_model(options)
    quiet = record.Quiet()
    mode = plain if options.compare is None else MODES[options.compare]
    found = mode(setup)
    return record.header(options, setup, quiet.others(options.threads)) | found


def read(options: argparse.Namespace, max_len: int | None, block_tokens: int) -> Trace:
    """Read the trace, scaled to ``max_len`` tokens (None: as recorded)."""
    path = options.traces / FILES[options.trace]
    if not path.is_file():
        raise TraceError(f"there is no {path}: put the trace there, or name its folder with --traces")
    requests = (read_azure if options.trace == "azure" else read_mooncake)(path)[:: options.every][: options.requests]
    longest = max_len or sum(max(getattr(r, part) for r in requests) for part in ("prompt_len", "output_len"))
    if options.trace == "azure":
        return scale_azure(requests, longest, options.scale)
    return scale_mooncake(requests, longest, options.block_tokens or block_tokens)


def _without_model(options: argparse.Namespace) -> Setup:
    trace = read(options, options.max_model_len, MOONCAKE_BLOCK)
    longest = options.max_model_len or trace.longest
    return _setup(options, trace, 32_000, lambda config: FakeServer(resolved(config, longest)))


def _with_model(options: argparse.Namespace) -> Setup:
    use_compilation_cache(None)
    model = load_model(options.model, options.dtype, show_progress=False)
    trace = read(options, options.max_model_len or model.config.max_position, 16)
    return _setup(options, trace, model.config.vocab_size, lambda config: RealServer(model, config))


def _setup(options: argparse.Namespace, trace: Trace, vocab: int, open_server: Callable[[EngineConfig], Any]) -> Setup:
    settings = {"max_num_seqs": options.max_num_seqs, "page_size": options.page_size, "seed": 0, **dict(options.set)}
    at_once = options.speed is None
    return Setup(
        trace=trace,
        open=open_server,
        config=EngineConfig(max_model_len=options.max_model_len, **settings),
        vocab=vocab,
        rounds=options.rounds,
        seed=options.seed,
        speed=options.speed,
        outstanding=options.outstanding or (4 * options.max_num_seqs if at_once else None),
        pool_share=options.pool_share,
        prefix_len=options.prefix_len,
    )


if __name__ == "__main__":
    sys.exit(main())
