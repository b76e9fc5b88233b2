"""Cost of the front end here and in another checkout at the same time, so that drift of the machine's speed, which on
shared machines exceeds the difference to measure, affects both.

    git worktree add /tmp/before f9f49f7
    python benchmarks/serve_pairs.py /tmp/before --pairs 8

Each side has a server and a load of its own, as in `benchmarks/serve_load.py`, with half of the streams.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.serve_load import DOORS
from benchmarks.traces import record

HERE = pathlib.Path(__file__).resolve().parent.parent
# Script that runs in either checkout; it imports that checkout's `benchmarks.serving`.
_RUN = """
import asyncio, json, sys
from benchmarks.serving import load
door, streams, rate, groups, seconds = sys.argv[1], *map(float, sys.argv[2:])
asked = load.Delivery(door, int(streams), rate, int(groups), seconds)
print(json.dumps(asyncio.run(load.deliver(asked))))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options = parse(arguments)
    result: dict[str, Any] = {"other": str(options.other), "pairs": {}}
    for door in options.doors:
        pairs = [pair(options, door, turn) for turn in range(options.pairs)]
        result["pairs"][door] = pairs
        print(f"{door}: {summary(pairs)}", flush=True)
    if options.out is not None:
        record.keep(result, options.out)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("other", type=pathlib.Path, help="a checkout to compare with")
    add("--doors", nargs="+", choices=DOORS, default=DOORS, help="default: both")
    add("--pairs", type=int, default=8, help="of runs (default 8)")
    add("--streams", type=int, default=250, help="at once, of each side (default 250)")
    add("--rate", type=float, default=2500.0, help="tokens a second of a side's streams (default 2500)")
    add("--seconds", type=float, default=10.0, help="of each run (default 10)")
    add("--groups", type=int, default=10, help="in which a step's tokens leave the engine (default 10)")
    add("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


def pair(options: argparse.Namespace, door: str, turn: int) -> dict[str, float]:
    """Return the microseconds of the front end per token in this checkout and the other."""
    trees = {"here": HERE, "there": options.other.resolve()}
    order = list(trees) if turn % 2 == 0 else list(trees)[::-1]
    running = {name: started(options, door, trees[name]) for name in order}
    found = {name: cost(running[name]) for name in trees}
    print(f"  {door} {turn}: here {found['here']:.1f} us, there {found['there']:.1f} us", flush=True)
    return found


def started(options: argparse.Namespace, door: str, tree: pathlib.Path) -> subprocess.Popen[str]:
    """Start a run of ``tree``'s server."""
    load = map(str, (options.streams, options.rate, options.groups, options.seconds))
    return subprocess.Popen([sys.executable, "-c", _RUN, door, *load], cwd=tree, stdout=subprocess.PIPE, text=True)


def cost(running: subprocess.Popen[str]) -> float:
    """Wait for a run to end; return the microseconds of its front end per token."""
    out, _ = running.communicate()
    if running.returncode:
        raise SystemExit(f"a run ended with {running.returncode}")
    return 1e6 * json.loads(out.splitlines()[-1])["cpu_per_token"]["front"]


def summary(pairs: Sequence[dict[str, float]]) -> str:
    """Format the medians, and the ratio with its standard error."""
    ratios = np.array([one["here"] / one["there"] for one in pairs])
    here, there = (np.median([one[name] for one in pairs]) for name in ("here", "there"))
    error = ratios.std(ddof=1) / np.sqrt(len(ratios)) if len(ratios) > 1 else float("nan")
    return (
        f"medians {here:.1f} and {there:.1f} us a token; ratio median {np.median(ratios):.3f}, "
        f"mean {ratios.mean():.3f} +- {error:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
