"""Cost of drawing tokens here and in another checkout, as a share of a decode step of the demo model on a CPU.

    git worktree add /tmp/before c5fe1031
    python benchmarks/draws.py /tmp/before

Each side is a process with an engine, and the sampler's program by itself. Both take turns, in rotating order. Time is
CPU time, in which other programs take less part; medians count.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.peers import machine
from benchmarks.speculation import error_of_median
from benchmarks.traces import record

HERE = pathlib.Path(__file__).resolve().parent.parent
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k": {"temperature": 1.0, "top_k": 40},
}
# Script that runs in either checkout. Each line asks for a turn of one kind of rows, and is answered by the CPU seconds
# of the sampler and of a step.
_RUN = """
import json, sys, time
import jax, numpy as np
from jaxinfer.llm import LLM
from jaxinfer.sampling import HostSlots, SamplingLimits, new_state, sample
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request

rows, tokens, calls = map(int, sys.argv[1:])
llm = LLM("demo", "float32", max_num_seqs=rows, max_model_len=512, show_progress=False)
limits, program = SamplingLimits(), jax.jit(sample, static_argnums=6)
state = new_state(rows, llm.model.config.vocab_size, limits)
logits = 3 * np.random.default_rng(0).normal(size=state.counts.shape).astype(np.float32)
for line in sys.stdin:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **json.loads(line))
    host, places, on = HostSlots(rows, limits), np.arange(rows, dtype=np.int32), np.ones(rows, bool)
    for slot in range(rows):
        host.set(slot, Request("r", (0,), params), slot)
    given = jax.device_put((logits, host.snapshot(), state, places, places, on))
    program(*given, 0)[0].tokens.block_until_ready()
    begin = time.process_time()
    for _ in range(calls):
        program(*given, 0)[0].tokens.block_until_ready()
    sampler, before, begin = (time.process_time() - begin) / calls, llm.engine.stats().steps, time.process_time()
    llm.generate([[0, 5 + row] for row in range(rows)], params)
    print(json.dumps([sampler, (time.process_time() - begin) / (llm.engine.stats().steps - before)]), flush=True)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options, quiet, cores = parse(arguments), record.Quiet(), len(machine.usable_cores())
    sides = {name: started(options, tree) for name, tree in {"here": HERE, "there": options.other.resolve()}.items()}
    found = {kind: [turn(sides, kind, number) for number in range(-1, options.rounds)][1:] for kind in KINDS}
    for side in sides.values():
        side.communicate()
    rows = {kind: figures(turns) for kind, turns in found.items()}
    result = record.base(options, cores, quiet.others(cores)) | {"rows": rows}
    print(f"| {options.rows} rows | sampler, us | before | step, ms | added, of a step |\n|---|---|---|---|---|")
    print("\n".join([*(line(kind, row) for kind, row in rows.items()), *record.doubts(result)]))
    if options.out is not None:
        record.keep(result, options.out)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("other", type=pathlib.Path, help="a checkout to compare with")
    add("--rows", type=int, default=8, help="sequences at once (default 8)")
    add("--tokens", type=int, default=24, help="of a sequence and turn (default 24)")
    add("--calls", type=int, default=100, help="of the sampler in a turn (default 100)")
    add("--rounds", type=int, default=30, help="turns of each kind (default 30)")
    add("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


def started(options: argparse.Namespace, tree: pathlib.Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _RUN, str(options.rows), str(options.tokens), str(options.calls)]
    return subprocess.Popen(command, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def turn(sides: Mapping[str, subprocess.Popen[str]], kind: str, number: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of the sampler and of a step in each checkout."""
    found = {}
    for name in list(sides)[:: 1 if number % 2 else -1]:
        stdin, stdout = sides[name].stdin, sides[name].stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(KINDS[kind]), file=stdin, flush=True)
        found[name] = tuple(json.loads(stdout.readline()))
    return found


def figures(turns: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Return medians: seconds of the sampler in both checkouts and of a step, and the added share with its error."""
    step = statistics.median(one["there"][1] for one in turns)
    added = [(one["here"][0] - one["there"][0]) / step for one in turns]
    here, there = (statistics.median(one[name][0] for one in turns) for name in ("here", "there"))
    return {
        "here": here,
        "there": there,
        "step": step,
        "added": statistics.median(added),
        "error": error_of_median(added),
    }


def line(kind: str, row: Mapping[str, float]) -> str:
    sampler = f"{1e6 * row['here']:.0f} | {1e6 * row['there']:.0f} | {1e3 * row['step']:.2f}"
    return f"| {kind} | {sampler} | {row['added']:+.1%} ± {row['error']:.1%} |"


if __name__ == "__main__":
    sys.exit(main())
