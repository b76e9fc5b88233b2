"""Time to first token of a light tenant while other tenants flood the engine, and each tenant's share of the tokens.

    python benchmarks/fair_shares.py                          floods of one, ten and a hundred tenants; some minutes
    python benchmarks/fair_shares.py --policy fcfs            the same without fair shares
    python benchmarks/fair_shares.py --flood-input 900 --flood-output 4       a flood of long prompts
    python benchmarks/fair_shares.py --probes 50 --out FILE

One engine serves the demo model. Each flood tenant always has requests waiting; the light tenant requests a few tokens
now and then. Its TTFT is compared with that on the idle engine just before, and the tokens of the flood tenants by
Jain's index (1: equal shares, relative to their weights).
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.types import Request

SLOTS, PROMPT, FEW = 16, 48, 8
FLOODS = (1, 10, 100)


class Flood:
    """Load of tenants that keep ``depth`` requests each in an engine. Every other tenant has twice the weight."""

    def __init__(self, engine: Any, tenants: int, depth: int, lengths: tuple[int, int]) -> None:
        self._engine, self._numbers, self._lengths = engine, itertools.count(), lengths
        self.weights = {f"flood{number}": 1.0 + number % 2 for number in range(tenants)}
        self._depth, self._outstanding = depth, dict.fromkeys(self.weights, 0)
        self.got = dict.fromkeys(self.weights, 0)

    def fill(self) -> None:
        for tenant, weight in self.weights.items():
            while self._outstanding[tenant] < self._depth:
                self._outstanding[tenant] += 1
                number = next(self._numbers)
                self._engine.add(request(f"{tenant}/{number}", tenant, self._lengths, number, weight))

    def take(self, deltas: Sequence[Any]) -> None:
        for delta in deltas:
            tenant = delta.request_id.partition("/")[0]
            if tenant in self.got:
                self.got[tenant] += len(delta.token_ids)
                self._outstanding[tenant] -= delta.finish_reason is not None

    def end(self) -> None:
        """Abort all flood requests."""
        for number in range(next(self._numbers)):
            for tenant in self.weights:
                self._engine.abort(f"{tenant}/{number}")
        while self._engine.has_work:
            self._engine.step()


def request(name: str, tenant: str, lengths: tuple[int, int], seed: int, weight: float = 1.0) -> Request:
    """Build a request of these prompt and output lengths. Prompts share no prefix, so the prefix cache has no hits."""
    given, most = lengths
    prompt = tuple(int(token) for token in np.random.default_rng([seed, most]).integers(10, 200, given))
    params = SamplingParams(max_tokens=most, ignore_eos=True, seed=seed)
    return Request(name, prompt, params, tenant=tenant, weight=weight)


def first_token(engine: Any, flood: Flood | None, number: int) -> float:
    """Return the TTFT of a light request in seconds; the request then runs to its end."""
    name, begun, first = f"light/{number}", time.perf_counter(), 0.0
    engine.add(request(name, "light", (PROMPT, FEW), 10**6 + number))
    while True:
        if flood is not None:
            flood.fill()
        deltas = engine.step()
        mine = [delta for delta in deltas if delta.request_id == name]
        if mine and not first:
            first = time.perf_counter() - begun
        if flood is not None:
            flood.take(deltas)
        if any(delta.finish_reason is not None for delta in mine):
            return first


def row(engine: Any, tenants: int, probes: int, between: int, lengths: tuple[int, int]) -> dict[str, Any]:
    """Return the figures of one flood, after it has filled all slots, with ``between`` steps between two probes."""
    solo = [first_token(engine, None, number) for number in range(probes)]
    flood = Flood(engine, tenants, max(2, 2 * SLOTS // tenants), lengths)
    for _ in range(tenants + 100):
        flood.fill()
        flood.take(engine.step())
    before, seen = dict(flood.got), []
    for number in range(probes):
        seen.append(first_token(engine, flood, probes + number))
        for _ in range(between):
            flood.fill()
            flood.take(engine.step())
    shares = np.array([(flood.got[name] - before[name]) / weight for name, weight in flood.weights.items()])
    flood.end()
    alone, beside = np.percentile(solo, [50, 99]), np.percentile(seen, [50, 99])
    return {
        "tenants": tenants,
        "solo_ms": (1e3 * alone).tolist(),
        "flood_ms": (1e3 * beside).tolist(),
        "ratio": (beside / alone).tolist(),
        "jain": float(shares.sum() ** 2 / (len(shares) * (shares**2).sum())),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options = _parse(arguments)
    llm = LLM(model="demo", max_num_seqs=SLOTS, scheduling_policy=options.policy, max_model_len=1024)
    rows, lengths = [], (options.flood_input, options.flood_output)
    print(
        "| tenants | TTFT solo p50, p99 ms | under the flood | ratio | Jain's index |\n| --- | --- | --- | --- | --- |"
    )
    for tenants in options.floods:
        rows.append(found := row(llm.engine, tenants, options.probes, options.between, lengths))
        cells = (" ".join(f"{each:.2f}" for each in found[name]) for name in ("solo_ms", "flood_ms", "ratio"))
        print(f"| {tenants} | {' | '.join(cells)} | {found['jain']:.3f} |", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"policy": options.policy, "rows": rows}, indent=1) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="fair", help="scheduling policy (default: fair)")
    parser.add_argument(
        "--floods", type=int, nargs="+", default=FLOODS, help="numbers of other tenants (default: 1 10 100)"
    )
    parser.add_argument("--probes", type=int, default=100, help="light requests of each flood (default: 100)")
    parser.add_argument("--between", type=int, default=20, help="steps between two of them (default: 20)")
    parser.add_argument("--flood-input", type=int, default=PROMPT, help="tokens of its prompts (default: 48)")
    parser.add_argument("--flood-output", type=int, default=600, help="tokens of its outputs (default: 600)")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
