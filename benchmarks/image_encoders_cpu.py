"""Encoding of images on a CPU: jaxinfer's tower and that of transformers, in turns, on the same shapes.

    python benchmarks/image_encoders_cpu.py --oracle-python .venv-oracle/bin/python
    python benchmarks/image_encoders_cpu.py --towers tiny --sizes "616 x 896"

See docs/benchmarks.md. Only the tower is measured: pixels are resized and normalised already.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.image_encoders.towers import GRIDS, TOWERS
from benchmarks.peers.turns import Peers, add_options, compare, in_turns

PEERS = {"ours": "image_encoders.jax_peer", "torch": "image_encoders.torch_peer"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0, or 2 with a message when it cannot measure."""
    options = parse(arguments)
    cells = [(tower, size, dtype) for tower in options.towers for size in options.sizes for dtype in options.dtypes]
    return compare("image-encoders", PEERS, options, lambda peers: [measure(peers, *cell, options) for cell in cells])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 1.0, "image-encoders")
    parser.add_argument("--towers", nargs="+", choices=TOWERS, default=list(TOWERS), help="default: all")
    parser.add_argument("--sizes", nargs="+", choices=GRIDS, default=list(GRIDS), help="of images (default: all)")
    return parser.parse_args(arguments)


def measure(peers: Peers, tower: str, size: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return times in milliseconds; a ratio above 1 means that jaxinfer is faster."""
    problem = {"tower": tower, "grid": GRIDS[size], "dtype": dtype, "seconds": options.seconds}
    times, ratio = in_turns(peers, options.rounds, "encode", **problem)
    millis = {name: seconds * 1e3 for name, seconds in times.items()}
    row = {"tower": tower, "size": size, "dtype": dtype, **{f"{name}_ms": round(ms, 2) for name, ms in millis.items()}}
    print(f"{tower:5} {size:10} {dtype:9} ours {millis['ours']:8.1f} ms  torch {millis['torch']:8.1f} ms  {ratio:5.2f}")
    return {**row, "ratio": round(ratio, 3)}


if __name__ == "__main__":
    sys.exit(main())
