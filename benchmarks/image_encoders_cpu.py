"""Encoding of images on a CPU: jaxinfer's tower and that of transformers, in turns, on the same shapes.

    python benchmarks/image_encoders_cpu.py --oracle-python .venv-oracle/bin/python

See docs/benchmarks.md. Only the tower is measured: pixels are resized and normalised already.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.attention_cpu import start_peers
from benchmarks.image_encoders.towers import GRIDS, TOWERS
from benchmarks.peers import machine
from benchmarks.peers.worker import REPO, PeerDied, Worker

PEERS = {"ours": "image_encoders.jax_peer", "torch": "image_encoders.torch_peer"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0, or 2 with a message when it cannot measure."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as logs:
        try:
            peers = start_peers(PEERS, options.oracle_python, pathlib.Path(logs))
            cells = [(tower, size, dtype) for tower in TOWERS for size in GRIDS for dtype in options.dtypes]
            rows = [measure(peers, *cell, options) for cell in cells]
        except PeerDied as cause:
            print(f"image_encoders_cpu: {cause}", file=sys.stderr)
            return 2
    versions = {name: peer.versions for name, peer in peers.items()}
    for peer in peers.values():
        peer.close()
    threads = len(machine.usable_cores())
    record = {"machine": machine.describe(threads), "versions": versions, "rounds": options.rounds, "rows": rows}
    out = options.out or default_file()
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"slowest beside torch: {min(row['ratio'] for row in rows):.2f}; written to {out}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--oracle-python", type=pathlib.Path, default=REPO / ".venv-oracle" / "bin" / "python", help="has torch")
    add("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    add("--rounds", type=int, default=5, help="turns of each (default 5)")
    add("--seconds", type=float, default=1.0, help="of each turn (default 1)")
    add("--out", type=pathlib.Path, help="JSON file (default: benchmarks/results/image-encoders-<cpu>-<date>.json)")
    return parser.parse_args(arguments)


def measure(peers: dict[str, Worker], tower: str, size: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of the turns' medians in milliseconds; a ratio above 1 means that jaxinfer is faster."""
    problem = {"tower": tower, "grid": GRIDS[size], "dtype": dtype, "seconds": options.seconds}
    turns: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(options.rounds):
        for name, peer in peers.items():
            turns[name].append(peer.ask("encode", **problem)["median"])
    millis = {name: statistics.median(times) * 1e3 for name, times in turns.items()}
    ratio = statistics.median(theirs / ours for ours, theirs in zip(turns["ours"], turns["torch"], strict=True))
    row = {"tower": tower, "size": size, "dtype": dtype, **{f"{name}_ms": round(ms, 2) for name, ms in millis.items()}}
    print(f"{tower:5} {size:10} {dtype:9} ours {millis['ours']:8.1f} ms  torch {millis['torch']:8.1f} ms  {ratio:5.2f}")
    return {**row, "ratio": round(ratio, 3)}


def default_file() -> pathlib.Path:
    name = f"image-encoders-{machine.slug(machine.cpu_name())[:8].strip('-')}-{datetime.date.today().isoformat()}.json"
    return REPO / "benchmarks" / "results" / name


if __name__ == "__main__":
    sys.exit(main())
