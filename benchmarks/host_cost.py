"""Host cost of a step: the scheduler and the page allocator, with a device that answers at once.

    python benchmarks/host_cost.py              32 to 512 running sequences, none and 10,000 waiting: about a minute
    python benchmarks/host_cost.py --profile    a profile of the steps, at 256
    python benchmarks/host_cost.py --runner     also the host cost of the model runner: launching and reading, at 256

See docs/benchmarks.md for what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pathlib
import pstats
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.traces import cost, record, runner_cost


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options = parse(arguments)
    if options.profile:
        profile(options)
        return 0
    result = measure(options)
    print(cost.table(result["rows"]))
    if result["runner"] is not None:
        print("\n" + runner_cost.describe(result["runner"]))
    print("\n".join(["", *cost.summary(result), *record.doubts(result)]))
    if options.out is not None:
        record.keep(result, options.out)
        print(f"kept in {options.out}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sequences", type=_numbers, default=[32, 64, 128, 256, 512], help="running at once: 32,64,128,256,512")
    add("--waiting", type=_numbers, default=[0, 10_000], help="requests in the queue: 0,10000")
    add("--steps", type=int, default=2000, help="steps to measure (default 2000)")
    add("--set", type=json.loads, default={}, metavar="JSON", help='fields of EngineConfig: {"page_size": 16}')
    add("--profile", action="store_true", help="cProfile of 256 sequences instead of figures")
    add("--runner", action="store_true", help="measure launching and reading too, with programs that do nothing")
    add("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a row for each number of running sequences and of waiting requests."""
    quiet = record.Quiet()
    loads = [cost.Load(running, waiting, options.set) for waiting in options.waiting for running in options.sequences]
    rows = [cost.row(load, options.steps) for load in loads]
    runner = runner_cost.row(cost.Load(cost.GOAL_AT, 0, options.set), options.steps) if options.runner else None
    found = {"rows": rows, "verdicts": cost.verdicts(rows), "runner": runner}
    return record.base(options, 1, quiet.others(1)) | found


def profile(options: argparse.Namespace) -> None:
    """Print a profile of steps of 256 sequences."""
    load, profiler = cost.Load(cost.GOAL_AT, max(options.waiting), options.set), cProfile.Profile()
    steady = cost.Steady(load, cost.without_device(load))
    for _ in range(options.steps):
        steady.top_up()
        profiler.enable()
        steady.server.step()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    sys.exit(main())
