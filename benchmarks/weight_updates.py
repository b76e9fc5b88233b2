"""Time of `LLM.update_weights`, relative to placing the same bytes with `jax.device_put`, in turns.

    python benchmarks/weight_updates.py [--rounds 15] [--json FILE]

The model is a random Llama of 125M parameters. A trainer's arrays are numpy arrays (both copy them), or JAX arrays that
must not be shared (``copy=True``; both copy them on the device). An update of arrays that may be shared copies nothing;
its own time is given in milliseconds. Requests run in between, so that each update also restarts what was computed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.kv_dtypes import random_llama
from jaxinfer.compilations import count_compilations
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams


def seconds(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - begun


def measure(llm: LLM, rounds: int) -> dict[str, Any]:
    """Return medians and the ratios of the median of updates to that of bare copies, by kind of array."""
    params = llm.model.params
    shardings = jax.tree.map(lambda x: x.sharding, params)
    given = {"numpy": jax.tree.map(np.array, params), "jax": jax.tree.map(lambda x: x + 0, params)}
    bare: dict[str, Callable[[], Any]] = {
        # `device_put` alone may use a numpy array's own memory, which its owner may change
        "numpy": lambda: jax.tree.map(lambda x, where: jax.device_put(np.array(x), where), given["numpy"], shardings),
        "jax": lambda: jax.tree.map(
            lambda x, where: jax.device_put(x, where, may_alias=False), given["jax"], shardings
        ),
    }
    updates: dict[str, Callable[[], Any]] = {
        "numpy": lambda: llm.update_weights(given["numpy"]).seconds,
        "jax": lambda: llm.update_weights(given["jax"], copy=True).seconds,
        "shared": lambda: llm.update_weights(given["jax"]).seconds,
    }
    found: dict[str, list[float]] = {name: [] for name in (*(f"bare {kind}" for kind in bare), *updates)}
    work = [list(range(40)), list(range(50, 70))], SamplingParams(max_tokens=4, temperature=0.0)
    for kind in (*bare, *updates):  # warm
        (bare | updates)[kind]()
    with count_compilations() as compilations:
        for _ in range(rounds):
            for kind, copy in bare.items():
                found[f"bare {kind}"].append(seconds(copy))
                llm.generate(*work, progress=False)
                found[kind].append(seconds(updates[kind]))
            llm.generate(*work, progress=False)
            found["shared"].append(seconds(updates["shared"]))
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "ratio": {kind: round(medians[kind] / medians[f"bare {kind}"], 3) for kind in bare},
        "milliseconds": {name: round(1000 * median, 2) for name, median in medians.items()},
        "compilations": compilations.count,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    llm = LLM(random_llama("float32"), max_num_seqs=4, max_model_len=128, show_progress=False)
    result = measure(llm, options.rounds)
    text = json.dumps(result, indent=1)
    if options.json is not None:
        options.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
