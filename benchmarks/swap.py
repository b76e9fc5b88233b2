"""Cost of swapping pages to host memory and back: a page each way, and an engine whose sequences are preempted.

    python benchmarks/swap.py                     this tree
    python benchmarks/swap.py --other TREE        this tree and another one in turns, each round in a process of its own

Times are by the wall clock, around synchronised calls; medians of rounds. The load is requests that all arrive
at once, with so few pages that sequences are swapped; their tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.execution.calibration import measure_costs
from jaxinfer.gpu_check.llama import random_model
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
HERE = pathlib.Path(__file__).resolve().parent.parent
ROUND = "--one-round"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=pathlib.Path, help="another source tree, measured in turns with this one")
    parser.add_argument("--rounds", type=int, default=5, help="of each tree (default 5)")
    parser.add_argument(ROUND, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one_round:
        print(json.dumps(one_round()))
        return 0
    trees = [HERE, *([options.other.resolve()] if options.other else [])]
    found: dict[pathlib.Path, list[dict[str, Any]]] = {tree: [] for tree in trees}
    for number in range(options.rounds):
        for tree in trees if number % 2 else reversed(trees):
            found[tree].append(_in_tree(tree))
    if len({json.dumps(one["tokens"]) for rounds in found.values() for one in rounds}) != 1:
        print("the trees give different tokens")
        return 1
    print(_table(found))
    return 0


def _in_tree(tree: pathlib.Path) -> dict[str, Any]:
    """Run one round with the package of a tree."""
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), ROUND]
    surroundings = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=surroundings, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _table(found: dict[pathlib.Path, list[dict[str, Any]]]) -> str:
    lines = ["| | " + " | ".join(f"{tree.name}: median (least)" for tree in found) + " |"]
    lines.append("|---" * (len(found) + 1) + "|")
    for name in next(iter(found.values()))[0]:
        if name != "tokens":
            cells = [[one[name] for one in rounds] for rounds in found.values()]
            figures = " | ".join(f"{statistics.median(each):.4g} ({min(each):.4g})" for each in cells)
            lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


def one_round() -> dict[str, Any]:
    """Measure the figures of this process's package."""
    settings: dict[str, Any] = {"max_num_seqs": 8, "page_size": 32, "max_model_len": 512, "prefill_sizes": (64,)}
    settings |= {"exactness": "relaxed", "enable_prefix_caching": False}  # so that startup probes no programs
    begun = time.perf_counter()
    llm = LLM(random_model(MODEL), num_pages=40, **settings)
    started = time.perf_counter() - begun
    prompts = [[(7 * at + 13 * number) % 500 + 1 for at in range(60)] for number in range(16)]
    sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    begun = time.perf_counter()
    outputs = llm.generate(prompts, [sampling] * len(prompts))
    seconds = time.perf_counter() - begun
    costs = [_swap_page(llm) for _ in range(6)]
    return {
        "seconds to start": started,
        "seconds of the load": seconds,
        "sequences swapped": llm.engine.stats().preemptions.get("swap", 0),
        "ms a page, out and in": 1e3 * min(costs),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


def _swap_page(llm: Any) -> float:
    engine = llm.engine
    found: float = measure_costs(engine._executor, engine.config, 1).swap_page
    return found


if __name__ == "__main__":
    sys.exit(main())
