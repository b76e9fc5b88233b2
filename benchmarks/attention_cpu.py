"""Attention on a CPU: the XLA path and torch's SDPA as transformers calls it, in turns, on the same shapes.

    python benchmarks/attention_cpu.py --oracle-python .venv-oracle/bin/python

See docs/benchmarks.md. Only attention is measured: keys and values are in their caches already.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.attention.shapes import Shape
from benchmarks.peers import machine
from benchmarks.peers.worker import REPO, PeerDied, Worker

_RAGGED = tuple(40 + 61 * row for row in range(32))  # 40 to 1931 keys, 985 on average
_FEW = {"heads": 32, "kv_heads": 8, "head_dim": 128}
SHAPES = (
    *(Shape(f"decode {rows} x {keys}", 1, (keys,) * rows) for rows in (1, 8, 32) for keys in (128, 512, 2048)),
    Shape("decode 32 ragged", 1, _RAGGED),
    Shape("decode 1 x 2048 and 31 x 64", 1, (2048, *(64,) * 31)),
    Shape("decode 8 x 512, 4 heads a KV head", 1, (512,) * 8, **_FEW),
    Shape("decode 32 ragged, 4 heads a KV head", 1, _RAGGED, **_FEW),
    *(
        Shape(f"prefill {chunk} after {before}", chunk, (before + chunk,))
        for chunk in (128, 512)
        for before in (0, 1024)
    ),
    Shape("prefill 4 x 128 after 1024, 0, 0, 0", 128, (1152, 128, 128, 128)),
    Shape("prefill 512, 4 heads a KV head", 512, (512,), **_FEW),
)


PEERS = {"ours": "attention.xla_peer", "torch": "attention.sdpa_peer"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0, or 2 with a message when it cannot measure."""
    options = parse(arguments)
    shapes = [shape for shape in SHAPES if options.only in shape.name]
    with tempfile.TemporaryDirectory() as logs:
        try:
            peers = start_peers(PEERS, options.oracle_python, pathlib.Path(logs))
            rows = [measure(peers, shape, dtype, options) for dtype in options.dtypes for shape in shapes]
        except PeerDied as cause:
            print(f"attention_cpu: {cause}", file=sys.stderr)
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
    add("--seconds", type=float, default=0.1, help="of each turn (default 0.1)")
    add("--only", default="", help="shapes whose name contains this")
    add("--out", type=pathlib.Path, help="JSON file (default: benchmarks/results/attention-<cpu>-<date>.json)")
    return parser.parse_args(arguments)


def start_peers(modules: Mapping[str, str], python: pathlib.Path, logs: pathlib.Path) -> dict[str, Worker]:
    """Start peers, modules below `benchmarks` by name: the one called torch in the interpreter ``python``.

    Raises:
        PeerDied: one does not start.
    """
    peers: dict[str, Worker] = {}
    try:
        for name, module in modules.items():
            program = str(python.absolute()) if name == "torch" else sys.executable
            peers[name] = Worker(name, (program, "-m", f"benchmarks.{module}"), logs / name)
    except PeerDied:
        for peer in peers.values():
            peer.close()
        raise
    return peers


def measure(peers: dict[str, Worker], shape: Shape, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of the turns' medians in microseconds; a ratio above 1 means that jaxinfer is faster."""
    problem = {"shape": dataclasses.asdict(shape), "dtype": dtype, "seconds": options.seconds}
    turns: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(options.rounds):
        for name, peer in peers.items():
            turns[name].append(peer.ask("attend", **problem)["median"])
    micros = {name: statistics.median(times) * 1e6 for name, times in turns.items()}
    ratio = statistics.median(theirs / ours for ours, theirs in zip(turns["ours"], turns["torch"], strict=True))
    row = {"shape": shape.name, "dtype": dtype, **{f"{name}_us": round(us, 1) for name, us in micros.items()}}
    print(f"{dtype:9} {shape.name:40} ours {micros['ours']:9.0f} us  torch {micros['torch']:9.0f} us  {ratio:5.2f}")
    return {**row, "ratio": round(ratio, 3)}


def default_file() -> pathlib.Path:
    name = f"attention-{machine.slug(machine.cpu_name())[:8].strip('-')}-{datetime.date.today().isoformat()}.json"
    return REPO / "benchmarks" / "results" / name


if __name__ == "__main__":
    sys.exit(main())
