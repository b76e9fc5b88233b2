"""Attention on a CPU: the XLA path and torch's SDPA as transformers calls it, in turns, on the same shapes.

    python benchmarks/attention_cpu.py --oracle-python .venv-oracle/bin/python

See docs/benchmarks.md. Only attention is measured: keys and values are in their caches already.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.attention.shapes import Shape
from benchmarks.peers.turns import Peers, add_options, compare, in_turns

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

    def rows(peers: Peers) -> list[dict[str, Any]]:
        return [measure(peers, shape, dtype, options) for dtype in options.dtypes for shape in shapes]

    return compare("attention", PEERS, options, rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 0.1, "attention")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    return parser.parse_args(arguments)


def measure(peers: Peers, shape: Shape, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return times in microseconds; a ratio above 1 means that jaxinfer is faster."""
    problem = {"shape": dataclasses.asdict(shape), "dtype": dtype, "seconds": options.seconds}
    times, ratio = in_turns(peers, options.rounds, "attend", **problem)
    micros = {name: seconds * 1e6 for name, seconds in times.items()}
    row = {"shape": shape.name, "dtype": dtype, **{f"{name}_us": round(us, 1) for name, us in micros.items()}}
    print(f"{dtype:9} {shape.name:40} ours {micros['ours']:9.0f} us  torch {micros['torch']:9.0f} us  {ratio:5.2f}")
    return {**row, "ratio": round(ratio, 3)}


if __name__ == "__main__":
    sys.exit(main())
