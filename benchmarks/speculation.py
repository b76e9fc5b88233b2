"""Speculative decoding on this machine: tokens a second with each drafter over those without, and acceptance.

    python benchmarks/speculation.py                      the embedded model, two kinds of text, 1, 4 and 8 sequences
    python benchmarks/speculation.py --model random-125m  a random Llama of 125M parameters, whose text repeats itself

A constant number of requests runs at a time: a new one follows each that ends. Engines take turns, in rotating order;
the median of the ratios of a turn counts. Many short turns are more reliable than few long ones: the speed of machines
drifts. See docs/speculation.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from benchmarks.kv_dtypes import random_llama
from benchmarks.peers import machine
from benchmarks.traces import record
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.llm import LLM
from jaxinfer.loading import load_model
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request

SCENE = (
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n"
    "First Citizen:\nYou are all resolved rather to die than to famish?\n\nAll:\nResolved. resolved.\n\n"
)
KINDS = {
    "own kind": [
        "ROMEO:",
        "JULIET:",
        "KING RICHARD III:",
        "DUKE OF YORK:",
        "First Citizen:",
        "HAMLET:",
        "CLIFFORD:",
        "MENENIUS:",
    ],
    "repetitive": [
        SCENE * 3 + name for name in ("First Citizen:", "All:", "First", "Citizen", "Speak", "Before", "You", "We")
    ],
}
"""Texts like the model's training data, and texts that quote an earlier passage."""


@dataclasses.dataclass
class Way:
    """An engine with a drafter, and its results."""

    name: str
    llm: LLM
    ratios: list[float] = dataclasses.field(default_factory=list)
    speeds: list[float] = dataclasses.field(default_factory=list)
    before: EngineStats | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options, quiet = parse(arguments), record.Quiet()
    model = random_llama(options.dtype) if options.model == "random-125m" else load_model(options.model, options.dtype)
    print(
        "| text | sequences | drafter | tokens/s | ratio | mean acceptance length | (1-a^(k+1))/(1-a) | tokens a step "
        "| by bytes read |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for count in options.sequences:
        ways = engines(model, options, count)
        for kind in options.texts:
            rows += [line | {"text": kind, "sequences": count} for line in measure(ways, kind, count, options)]
            for row in rows[-len(ways) :]:
                print("| " + " | ".join(cells(row)) + " |", flush=True)
    found = {"rows": rows}
    result = record.base(options, len(machine.usable_cores()), quiet.others(len(machine.usable_cores()))) | found
    print("\n".join(record.doubts(result)))
    if options.out is not None:
        record.keep(result, options.out)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo", help='"demo", "random-125m" or a folder')
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="the model's (default float32)")
    add("--drafters", nargs="+", default=["ngram", "suffix"], help="default: ngram suffix")
    add("--sequences", type=int, nargs="+", default=[1, 4, 8], help="requests at once (default 1 4 8)")
    add("--rows", type=int, default=8, help="max_num_seqs of all engines (default 8)")
    add("--texts", nargs="+", default=list(KINDS), choices=KINDS, help="kinds of text (default: all)")
    add("--num-speculative-tokens", type=int, default=7, help="most tokens of a draft (default 7)")
    add("--tree", type=int, default=1, help="paths of a draft (default 1: chains)")
    add("--max-tokens", type=int, default=192, help="of an answer (default 192)")
    add("--temperature", type=float, default=0.0, help="default 0")
    add("--requests", type=int, default=2, help="of a turn, for each of those at once (default 2)")
    add("--rounds", type=int, default=20, help="turns (default 20)")
    add("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


def engines(model: Model, options: argparse.Namespace, count: int) -> list[Way]:
    settings: dict[str, Any] = {"max_num_seqs": max(options.rows, count), "max_model_len": 1024, "show_progress": False}
    drafts = {"num_speculative_tokens": options.num_speculative_tokens, "speculative_tree": options.tree}
    plain = Way("none", LLM(model, **settings))
    return [plain, *(Way(name, LLM(model, speculative=name, **settings, **drafts)) for name in options.drafters)]


def measure(ways: Sequence[Way], kind: str, count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a row for each way; the first way is the baseline."""
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True, seed=1)
    tokenizer: Any = ways[0].llm.tokenizer
    prompts = [tuple(tokenizer.encode(text)) for text in texts_of(kind, options.requests * count)]
    found: list[list[list[int]]] = []
    for way in ways:
        way.ratios, way.speeds, way.before = [], [], None
    for turn in range(options.rounds + 1):
        speeds = dict[str, float]()
        first = turn % len(ways)
        for way in (*ways[first:], *ways[:first]):
            way.before = way.before if turn > 1 else way.llm.engine.stats()
            way.llm.engine.reset_prefix_cache()
            speeds[way.name], tokens = serve(way.llm, prompts, params, count)
            found.append(tokens)
        if turn:
            for way in ways:
                way.speeds.append(speeds[way.name])
                way.ratios.append(speeds[way.name] / speeds[ways[0].name])
    if any(other != found[0] for other in found):
        raise AssertionError("a drafter has changed the text")
    return [row(way, options) for way in ways]


def texts_of(kind: str, count: int) -> list[str]:
    """Return prompts of a kind, all different."""
    endings = ("", "\nI", "\nThe", "\nMy", "\nNow", "\nWhat", "\nCome", "\nO")
    return [text + ending for ending in endings for text in KINDS[kind]][:count]


def serve(
    llm: LLM, prompts: Sequence[tuple[int, ...]], params: SamplingParams | Sequence[SamplingParams], count: int
) -> tuple[float, list[list[int]]]:
    """Return tokens a second while ``count`` requests run (refilled as they end), and the tokens of each."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    engine, waiting = llm.engine, iter(enumerate(prompts))
    tokens: list[list[int]] = [[] for _ in prompts]
    alive, made, seconds, begin = 0, 0, 0.0, time.perf_counter()
    while alive or not seconds:
        while alive < count and (following := next(waiting, None)) is not None:
            engine.add(Request(f"{following[0]}", following[1], each[following[0]]))
            alive += 1
        if alive < count and not seconds:
            seconds, made = time.perf_counter() - begin, sum(map(len, tokens))
        for delta in engine.step():
            tokens[int(delta.request_id)] += delta.token_ids
            alive -= delta.finish_reason is not None
    return made / seconds, tokens


def row(way: Way, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a way since its first turn that counts."""
    assert way.before is not None
    now, before = way.llm.engine.stats(), way.before
    drafts, tokens = now.drafts - before.drafts, now.draft_tokens - before.draft_tokens
    accepted = now.draft_accepted - before.draft_accepted
    failed = max(0, drafts - _whole(now, before, tokens, drafts))
    share = accepted / (accepted + failed) if accepted + failed else 0.0
    length = tokens / drafts if drafts else 0.0
    formula = (1 - share ** (length + 1)) / (1 - share) if drafts and share < 1 else None
    return {
        "drafter": way.name,
        "tokens_per_second": statistics.median(way.speeds),
        "ratio": statistics.median(way.ratios),
        "error": error_of_median(way.ratios),
        "drafts": drafts,
        "draft_tokens": tokens,
        "accepted": accepted,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "formula": formula,
        "by_bytes_read": None if formula is None else formula / (1 + drafting_cost(way.llm, length)),
        "tokens_a_step": (now.generated_tokens - before.generated_tokens) / max(1, now.steps - before.steps),
    }


def error_of_median(values: Sequence[float]) -> float:
    """Return the standard error of a median, by the quartiles."""
    if len(values) < 4:
        return float("nan")
    low, _, high = statistics.quantiles(values)
    return 1.25 * (high - low) / 1.35 / math.sqrt(len(values))


def drafting_cost(llm: LLM, length: float) -> float:
    """Return the bytes that drafting reads over those of a step: its cost where reading weights takes all the time, as
    on a GPU with few rows. N-grams and suffixes read nothing; Medusa heads are read once, other heads per token."""
    draft = llm.model.draft if llm.engine.config.drafts_on_device else None
    if draft is None:
        return 0.0
    passes = 1 if llm.engine.config.drafts_from_one_state else length
    return passes * read_bytes(draft) / read_bytes(llm.model)


def read_bytes(model: Model) -> int:
    """Return the bytes of the weights that a pass reads: embeddings are read by row and not counted, unless tied."""
    shared = dict(getattr(model.config, "shares", ()))
    whole = {name: leaf for name, leaf in model.params.items() if name != "embed" or model.config.tied}
    borrowed = 0 if "head" not in shared else model.config.vocab_size * model.config.hidden_size * model.dtype.itemsize
    return borrowed + sum(leaf.nbytes for leaf in jax.tree.leaves(whole))


def _whole(now: EngineStats, before: EngineStats, tokens: int, drafts: int) -> int:
    """Count the drafts that were accepted in full, as if all had the mean length."""
    place = round(tokens / drafts) - 1 if drafts else 0
    counts = [stats.draft_accepted_at[place] if place < len(stats.draft_accepted_at) else 0 for stats in (now, before)]
    return counts[0] - counts[1]


def cells(row: dict[str, Any]) -> list[str]:
    numbers = (row["acceptance_length"], row["formula"], row["tokens_a_step"], row["by_bytes_read"])
    figures = [f"{row['tokens_per_second']:.0f}", f"{row['ratio']:.2f} ± {row['error']:.2f}"]
    return [
        row["text"],
        str(row["sequences"]),
        row["drafter"],
        *figures,
        *("" if x is None else f"{x:.2f}" for x in numbers),
    ]


if __name__ == "__main__":
    sys.exit(main())
