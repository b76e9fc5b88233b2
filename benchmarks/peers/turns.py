"""Two processes that compute the same problem in turns: jaxinfer's and PyTorch's."""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.peers import machine
from benchmarks.peers.worker import REPO, PeerDied, Worker

Peers = dict[str, Worker]


def add_options(parser: argparse.ArgumentParser, seconds: float, name: str) -> None:
    """Add the options of `compare`; ``seconds``: default of a turn."""
    add = parser.add_argument
    add("--oracle-python", type=pathlib.Path, default=REPO / ".venv-oracle" / "bin" / "python", help="has torch")
    add("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    add("--rounds", type=int, default=5, help="turns of each (default 5)")
    add("--seconds", type=float, default=seconds, help=f"of each turn (default {seconds})")
    add("--out", type=pathlib.Path, help=f"JSON file (default: benchmarks/results/{name}-<cpu>-<date>.json)")


def compare(
    name: str,
    modules: Mapping[str, str],
    options: argparse.Namespace,
    measure: Callable[[Peers], Sequence[Mapping[str, Any]]],
) -> int:
    """Measure, and write the record. Returns 0, or 2 with a message when a peer cannot run.

    Args:
        name: begins the name of the record.
        modules: peers below `benchmarks` by name; the one called torch runs in the interpreter that the options name.
        measure: returns the rows, each with a ``ratio``.
    """
    with tempfile.TemporaryDirectory() as logs:
        try:
            peers = start(modules, options.oracle_python, pathlib.Path(logs))
            rows = measure(peers)
        except PeerDied as cause:
            print(f"{name}: {cause}", file=sys.stderr)
            return 2
    versions = {name: peer.versions for name, peer in peers.items()}
    for peer in peers.values():
        peer.close()
    threads = len(machine.usable_cores())
    record = {"machine": machine.describe(threads), "versions": versions, "rounds": options.rounds, "rows": rows}
    cpu, date = machine.slug(machine.cpu_name())[:8].strip("-"), datetime.date.today().isoformat()
    out = options.out or REPO / "benchmarks" / "results" / f"{name}-{cpu}-{date}.json"
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"slowest beside torch: {min(row['ratio'] for row in rows):.2f}; written to {out}")
    return 0


def start(modules: Mapping[str, str], python: pathlib.Path, logs: pathlib.Path) -> Peers:
    """Start the peers; raises PeerDied where one does not start."""
    peers: Peers = {}
    try:
        for name, module in modules.items():
            program = str(python.absolute()) if name == "torch" else sys.executable
            peers[name] = Worker(name, (program, "-m", f"benchmarks.{module}"), logs / name)
    except PeerDied:
        for peer in peers.values():
            peer.close()
        raise
    return peers


def in_turns(peers: Peers, rounds: int, op: str, **problem: Any) -> tuple[dict[str, float], float]:
    """Return the medians of the turns' medians in seconds, and the median of the turns' ratios: above 1, jaxinfer is
    faster."""
    turns: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, peer in peers.items():
            turns[name].append(peer.ask(op, **problem)["median"])
    ratio = statistics.median(theirs / ours for ours, theirs in zip(turns["ours"], turns["torch"], strict=True))
    return {name: statistics.median(times) for name, times in turns.items()}, ratio
