"""Cost of the front end: 500 streams at 5,000 tokens a second, twice and ten times the requests that can be served,
and rejections by a full queue, one at a time and in bursts.

    python benchmarks/serve_load.py                   both APIs: two minutes and a half
    python benchmarks/serve_load.py --doors grpc --seconds 20
    python benchmarks/serve_load.py --profile FILE    cProfile of the front end under gRPC streams, no figures

See docs/benchmarks.md for what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.peers import machine
from benchmarks.serving import load, report
from benchmarks.traces import record

DOORS = ("grpc", "http")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options = parse(arguments)
    if options.profile is not None:
        asyncio.run(load.deliver(delivery(options, DOORS[0], options.groups), str(options.profile)))
        print(options.profile.read_text(encoding="utf-8"))
        return 0
    result = header(options) | asyncio.run(measure(options))
    print("\n".join([report.table(result["runs"]), "", *report.summary(result), *report.doubts(result["runs"])]))
    if options.out is not None:
        record.keep(result, options.out)
        print(f"kept in {options.out}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--doors", type=_doors, default=DOORS, help="grpc,http (default: both)")
    add("--streams", type=int, default=500, help="at once (default 500)")
    add("--rate", type=float, default=5000.0, help="tokens a second of all streams (default 5000)")
    add("--groups", type=int, default=10, help="in which a step's tokens leave the engine, evenly (default 10)")
    add("--seconds", type=float, default=8.0, help="of each run (default 8)")
    add("--connections", type=int, default=8, help="of gRPC, which the streams share (default 8)")
    add("--profile", type=pathlib.Path, help="file for cProfile's table of the front end")
    add("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


def _doors(text: str) -> tuple[str, ...]:
    doors = tuple(text.split(","))
    if set(doors) - set(DOORS):
        raise argparse.ArgumentTypeError(f"{text} is not among {', '.join(DOORS)}")
    return doors


def header(options: argparse.Namespace) -> dict[str, Any]:
    """Describe a run: date, machine, versions and options."""
    plain = {name: value for name, value in vars(options).items() if not isinstance(value, pathlib.Path)}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(machine.usable_cores()[-1] + 1),
        "versions": {name: importlib.metadata.version(name) for name in ("jaxinfer", "grpcio", "protobuf", "uvicorn")},
        "options": plain,
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Make all runs one after the other, each with a server of its own."""
    runs: dict[str, Any] = {}
    for door in options.doors:
        runs[f"{door} even"] = await load.deliver(delivery(options, door, options.groups))
        runs[f"{door} at once"] = await load.deliver(delivery(options, door, 1))
        for name, factor in (("overload", 2.0), ("overload x10", 10.0)):
            crowd = load.Overload(door, factor=factor, seconds=options.seconds, connections=options.connections)
            runs[f"{door} {name}"] = await load.overload(crowd)
        for name, at_once in (("full", 1), ("full, bursts", 64)):
            full = load.Refusals(door, at_once, connections=options.connections)
            runs[f"{door} {name}"] = await load.refuse(full)
    return {"runs": runs, "verdicts": report.verdicts(runs)}


def delivery(options: argparse.Namespace, door: str, groups: int) -> load.Delivery:
    return load.Delivery(door, options.streams, options.rate, groups, options.seconds, connections=options.connections)


if __name__ == "__main__":
    sys.exit(main())
