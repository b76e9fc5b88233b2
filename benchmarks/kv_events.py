"""Cost of KV events per step: the journal and its messages, compared with the steps of the demo model.

    python benchmarks/kv_events.py --out FILE.json     some minutes

Rounds with and without events alternate on one engine with the same requests: prompts that share no prefix and a full
pool, so that each new page evicts another. The share is the processor time of the engine's thread for
journal and messages over the time of the whole process for the steps; the ratio is that of both kinds of rounds.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.traces import record
from jaxinfer.engine.engine import Engine
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.core.kv_event_encoder import KvEventEncoder
from jaxinfer.serve.core.messages import encode
from jaxinfer.types import Request

GOAL = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options = parse(arguments)
    quiet = record.Quiet()
    rows = [row(options, page_size) for page_size in options.page_sizes]
    result = record.base(options, 1, quiet.others(1)) | {"rows": rows, "goal": GOAL}
    for each in rows:
        print(
            f"pages of {each['page_size']}: {each['share']:.2%} of a step ({each['microseconds']:.0f} us, "
            f"{each['pages']:.1f} pages came); rounds {each['ratio']:.4f} ({each['low']:.4f} to {each['high']:.4f})"
        )
    if options.out is not None:
        record.keep(result, options.out)
    return 0 if all(each["share"] <= GOAL for each in rows) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--page-sizes", type=int, nargs="+", default=[16, 64], help="tokens of a page (default 16 64)")
    add("--rounds", type=int, default=10, help="rounds of each kind (default 10)")
    add("--requests", type=int, default=24, help="requests of a round (default 24)")
    add("--prompt", type=int, default=200, help="tokens of a prompt (default 200)")
    add("--output", type=int, default=16, help="tokens of an output (default 16)")
    add("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


class Round:
    """Round of steps: their total time, and the time spent on events."""

    def __init__(self, core: Engine, requests: Sequence[Request], events: bool) -> None:
        core.reset_prefix_cache()
        core._kv._store.tree.touched = None
        telling = KvEventEncoder(core.journals() if events else (), None)
        self.steps = self.pages = 0
        self.events = 0.0
        start = time.process_time()
        for request in requests:
            core.add(request)
        while core.has_work:
            core.step()
            self.steps += 1
            self._tell(telling)
        self.seconds = time.process_time() - start

    def _tell(self, telling: KvEventEncoder) -> None:
        start = time.thread_time()
        for message in telling.messages():
            encode(message)
            self.pages += sum(len(run.hashes) for run in message.stored)
        self.events += time.thread_time() - start


def row(options: argparse.Namespace, page_size: int) -> dict[str, Any]:
    """Return the figures of one page size."""
    length, slots = options.prompt + options.output, 8
    pages = 2 * slots * -(-length // page_size)
    llm = LLM(model="demo", max_num_seqs=slots, max_model_len=512, page_size=page_size, num_pages=pages)
    core, rng, pairs = llm.engine, np.random.default_rng(0), list[tuple[Round, Round]]()
    assert isinstance(core, Engine)
    for number in range(options.rounds + 1):
        requests = [_request(f"{number}-{each}", rng, options) for each in range(options.requests)]
        order = [True, False] if number % 2 else [False, True]
        made = {events: Round(core, requests, events) for events in order}
        pairs.append((made[True], made[False]))
        gc.freeze()  # as the engine core of a server does
    with_events = [pair[0] for pair in pairs[1:]]  # the first pair warms up
    ratios = [on.seconds / off.seconds for on, off in pairs[1:]]
    steps, events = sum(each.steps for each in with_events), sum(each.events for each in with_events)
    return {
        "page_size": page_size,
        "share": events / sum(each.seconds for each in with_events),
        "microseconds": 1e6 * events / steps,
        "pages": sum(each.pages for each in with_events) / steps,
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
    }


def _request(name: str, rng: np.random.Generator, options: argparse.Namespace) -> Request:
    prompt = tuple(rng.integers(10, 1000, options.prompt).tolist())
    return Request(name, prompt, SamplingParams(max_tokens=options.output, temperature=0.0, seed=0, ignore_eos=True))


if __name__ == "__main__":
    sys.exit(main())
