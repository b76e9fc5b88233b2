"""Products of few rows on a CPU, by the C kernel and by XLA's library: ``python benchmarks/few_rows.py``.

GB/s of weights that are read from memory: each call has other weights, of 256 MB together. Both take turns, and the
ratio is the median of the rounds. ``bits`` says whether a row has the same bits as in the product of the most rows.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import few_rows

_BYTES = 256_000_000
_SHAPES = ((768, 3072), (3072, 768), (768, 32_000), (2048, 8192))  # inputs, outputs


def library(x: jax.Array, weights: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, weights, (((1,), (1,)), ((), ())), precision=precision)


def _chain(dot: Callable[[Any, Any], jax.Array], x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    """Multiply by one weight after the other, each product after the one before."""
    for weight in weights:
        x = x + dot(x, weight).sum().astype(x.dtype) * 0
    return x


def measure(dtype: str, inputs: int, outputs: int, counts: list[int], rounds: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.standard_normal((outputs, inputs)), dtype)]
    weights += [weights[0] + 0 for _ in range(max(2, _BYTES // weights[0].nbytes) - 1)]
    x = jnp.asarray(rng.standard_normal((max(counts), inputs)), dtype)
    paths = {"kernel": few_rows.dot, "library": library}
    most = {name: np.asarray(jax.jit(dot)(x, weights[0])) for name, dot in paths.items()}
    found = []
    for rows in counts:
        runs = {name: jax.jit(functools.partial(_chain, dot)) for name, dot in paths.items()}
        rates: dict[str, list[float]] = {name: [] for name in paths}
        for number in range(1 + rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run(x[:rows], weights).block_until_ready()
                if number:
                    rates[name].append(len(weights) * weights[0].nbytes / (time.perf_counter() - start) / 1e9)
        ratios = [one / other for one, other in zip(*rates.values(), strict=True)]
        same = {
            name: np.asarray(jax.jit(dot)(x[:rows], weights[0])).tobytes() == most[name][:rows].tobytes()
            for name, dot in paths.items()
        }
        row = {"dtype": dtype, "inputs": inputs, "outputs": outputs, "rows": rows}
        row |= {name: round(statistics.median(rate), 1) for name, rate in rates.items()}
        found.append(row | {"ratio": round(statistics.median(ratios), 2), "same_bits": same})
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="write a record of all rows there")
    args = parser.parse_args()
    found = [
        row
        for dtype in ("bfloat16", "float32", "float16")
        for shape in _SHAPES
        for row in measure(dtype, *shape, args.rows, args.rounds)
    ]
    if args.out:
        args.out.write_text(json.dumps({"jax": jax.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
