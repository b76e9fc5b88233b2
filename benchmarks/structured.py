"""Structured outputs on this machine: cost of grammars, forced tokens, and whether outputs match their schemas.

    python benchmarks/structured.py speed --tokenizer FOLDER    tokens a second of a random Llama of 125M parameters
                                                                where sequences have schemas, over those without
    python benchmarks/structured.py masks --tokenizer FOLDER    milliseconds until the masks of 64 sequences are ready
    python benchmarks/structured.py forced                      steps of the embedded model for each token of JSON
    python benchmarks/structured.py valid --schemas FOLDER      whether finished outputs validate, and are bitwise
                                                                identical alone, in a full batch and with drafts
    python benchmarks/structured.py hostile                     time between tokens of four sequences of the embedded
                                                                model next to grammars that take seconds, over that
                                                                next to other requests; --apart: helpers have a core
                                                                to themselves, and the engine all others

FOLDER of tokenizers: one with a tokenizer.json, such as Llama 2's for `speed` (a vocabulary of 32,000) and Llama 3's
for `masks` (128,256). FOLDER of schemas: MaskBench's files, objects with a ``schema``. See docs/structured_outputs.md.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jsonschema  # type: ignore[import-untyped]

from benchmarks.kv_dtypes import random_llama
from benchmarks.peers import machine
from benchmarks.speculation import error_of_median, serve
from benchmarks.traces import record
from jaxinfer.engine.engine import _vocabulary
from jaxinfer.helper_process import Helper
from jaxinfer.llm import LLM
from jaxinfer.loading import load_model
from jaxinfer.models.model import Model
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.structured import masks as masks_module
from jaxinfer.structured.grammar import compiled
from jaxinfer.structured.masks import Held, Masks
from jaxinfer.structured.schemas import GrammarError
from jaxinfer.text.load import load_tokenizer
from jaxinfer.types import Request
from jaxinfer.weights import init_params

_TEXT = {"type": "string", "pattern": "^[A-Z][a-z ]{3,24}$"}
_PERSON = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "member"],
    "additionalProperties": False,
}
_ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
        "status": {"enum": ["pending", "shipped", "delivered", "returned"]},
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "integer", "minimum": 1000, "maximum": 99999},
                    "price": {"type": "number"},
                },
                "required": ["sku", "price"],
                "additionalProperties": False,
            },
        },
        "customer": _PERSON,
    },
    "required": ["id", "status", "items", "customer"],
    "additionalProperties": False,
}
_EVENT = {
    "type": "object",
    "properties": {
        "title": _TEXT,
        "starts_at": {"type": "string", "format": "date-time"},
        "priority": {"enum": ["low", "normal", "high"]},
        "location": {
            "type": "object",
            "properties": {"latitude": {"type": "number"}, "longitude": {"type": "number"}},
            "required": ["latitude", "longitude"],
            "additionalProperties": False,
        },
        "attendees": {"type": "array", "items": _PERSON, "minItems": 1, "maxItems": 3},
    },
    "required": ["title", "starts_at", "priority", "location", "attendees"],
    "additionalProperties": False,
}
SCHEMAS = (_PERSON, _ORDER, _EVENT)
"""Schemas typical of applications: records with nested lists of records."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options, quiet = parse(arguments), record.Quiet()
    found = WAYS[options.way](options)
    cores = len(machine.usable_cores())
    result = record.base(options, cores, quiet.others(cores)) | {"rows": found}
    print("\n".join([*map(json.dumps, found), *record.doubts(result)]))
    if options.out is not None:
        record.keep(result, options.out)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("way", choices=WAYS)
    add("--tokenizer", type=pathlib.Path, help="folder with a tokenizer.json")
    add("--schemas", type=pathlib.Path, help="folder of MaskBench's files (default: three of applications)")
    add("--count", type=int, default=300, help="schemas of the folder (default 300)")
    add("--sequences", type=int, help="at once (default: speed 32, masks 64, forced 1, valid 8)")
    add("--max-tokens", type=int, default=128, help="of an answer (default 128)")
    add("--rounds", type=int, default=8, help="turns (default 8)")
    add("--alone", type=int, default=30, help="schemas that `valid` also runs by themselves (default 30)")
    add("--apart", action="store_true", help="hostile: a core for the helpers")
    add("--helpers", type=int, default=2, help="structured_output_helpers (default 2)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the model of 125M (default float32)")
    add("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure tokens a second with and without schemas, in turns."""
    count = options.sequences or 32
    model = random_llama(options.dtype).replace(tokenizer=load_tokenizer(options.tokenizer))
    settings: dict[str, Any] = {"max_num_seqs": count, "max_model_len": 512, "show_progress": False}
    llm = LLM(model, structured_output_helpers=options.helpers, **settings)
    return [_speed(llm, count, share, options) for share in (1.0, 0.5)]


def _speed(llm: LLM, count: int, share: float, options: argparse.Namespace) -> dict[str, Any]:
    """Measure speed where a share ``share`` of the sequences has schemas."""
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=options.max_tokens, ignore_eos=True)
    held = [plain if number % 2 >= 2 * share else _holding(plain, number) for number in range(2 * count)]
    prompts, speeds = [tuple(range(10 + i, 42 + i)) for i in range(2 * count)], list[dict[str, float]]()
    for turn in range(options.rounds + 1):
        ways = [("plain", [plain] * len(held)), ("held", held)]
        speeds.append({})
        for name, params in ways if turn % 2 else reversed(ways):
            llm.engine.reset_prefix_cache()
            speeds[-1][name] = serve(llm, prompts, params, count)[0]
    ratios = [each["held"] / each["plain"] for each in speeds[1:]]
    medians = {name: statistics.median(each[name] for each in speeds[1:]) for name in ("plain", "held")}
    found = {"ratio": statistics.median(ratios), "error": error_of_median(ratios)}
    return {"sequences": count, "with_schemas": share, "tokens_per_second": medians} | found


def _holding(plain: SamplingParams, number: int) -> SamplingParams:
    schema = {"type": "array", "items": SCHEMAS[number % len(SCHEMAS)], "minItems": 9}  # longer than the answers
    return dataclasses.replace(plain, structured_outputs={"json": schema})


def masks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the time from a step's tokens to the masks of the next step, for sequences in mid-answer."""
    count, size, tokenizer = options.sequences or 64, 128_256, load_tokenizer(options.tokenizer)
    assert tokenizer is not None
    grammars, rows = [json.dumps(schema) for schema in _servable(options)[0]], list[dict[str, Any]]()
    for ahead in (0, 4):
        made = Masks(lambda: _vocabulary(tokenizer, size), options.helpers, ahead)
        quantiles = statistics.quantiles(_latencies(made, grammars, count, options.rounds * 40), n=100)
        times = {name: 1e3 * quantiles[at] for name, at in (("p50", 49), ("p90", 89), ("p99", 98))}
        rows.append({"sequences": count, "vocabulary": size, "helpers": options.helpers, "ahead": ahead, "ms": times})
    return rows


def _latencies(made: Masks, grammars: Sequence[str], count: int, steps: int) -> Iterator[float]:
    """Yield the seconds of each step."""
    draw = random.Random(0)
    held = [made.open("json", grammars[i % len(grammars)]) for i in range(count)]
    _await(made, held)
    for _ in range(steps):
        while any(map(_ended, held)):
            held = [each if not _ended(each) else _anew(made, each, grammars, draw) for each in held]
            _await(made, held)
        said = [_draw(each, draw) for each in held]
        begin = time.perf_counter()
        for each, token in zip(held, said, strict=True):
            made.advance(each, [token])
        _await(made, held)
        yield time.perf_counter() - begin


def _await(made: Masks, held: Sequence[Held]) -> None:
    made.send()
    made.wait(held, 120.0)


def _ended(held: Held) -> bool:
    return held.stopped or held.error is not None or held.mask is None or len(held.said) > 200


def _anew(made: Masks, held: Held, grammars: Sequence[str], draw: random.Random) -> Held:
    made.close(held)
    return made.open("json", draw.choice(grammars))


def _draw(held: Held, draw: random.Random) -> int:
    """Draw one of the allowed tokens; in strings mostly a short one."""
    assert held.mask is not None
    words = [(i, int(word) & 0xFFFFFFFF) for i, word in enumerate(held.mask) if word]
    place, word = draw.choice(words)
    return 32 * place + draw.choice([bit for bit in range(32) if word >> bit & 1])


def forced(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure steps and tokens of the embedded model's JSON, with and without forced tokens; the text is the same."""
    (plain, text), (drafted, other) = _steps(options, None), _steps(options, "grammar")
    if text != other:
        raise AssertionError("what is forced has changed the text")
    return [plain, drafted]


def _steps(options: argparse.Namespace, method: str | None) -> tuple[dict[str, Any], list[list[int]]]:
    drafts: dict[str, Any] = {} if method is None else {"speculative": method, "num_speculative_tokens": 7}
    llm, count = LLM("demo", max_num_seqs=8, max_model_len=512, show_progress=False, **drafts), options.sequences or 1
    assert llm.tokenizer is not None
    prompts = [tuple(llm.tokenizer.encode(f"Record {i}: ")) for i in range(8)]
    schemas = zip(range(8), itertools.cycle(_schemas(options)), strict=False)
    params = [SamplingParams(seed=i, max_tokens=options.max_tokens, structured_outputs={"json": s}) for i, s in schemas]
    before = llm.engine.stats()
    _, text = serve(llm, prompts, params, count)
    now, made = llm.engine.stats(), sum(map(len, text))
    steps, accepted = now.steps - before.steps, now.draft_accepted - before.draft_accepted
    found = {"tokens": made, "steps": steps, "steps_a_token": steps / made * count, "accepted": accepted}
    return {"sequences": count, "drafts": method} | found, text


def valid(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Validate outputs of the embedded model and of random weights; compare them bitwise between modes."""
    asked, refused = _servable(options)
    rows = [{"schemas": len(asked) + len(refused), "served": len(asked), "refused": len(refused), "why": _why(refused)}]
    demo = load_model("demo")
    random_weights = demo.replace(params=init_params(demo.specs, 0, "float32"), name="random weights")
    return rows + [row for model in (demo, random_weights) for row in _valid(model, asked, options)]


def _valid(model: Model, asked: Sequence[dict[str, Any]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    settings: dict[str, Any] = {"max_num_seqs": options.sequences or 8, "max_model_len": 512, "show_progress": False}
    batch, drafts = LLM(model, **settings), LLM(model, speculative="ngram", speculative_adaptive=False, **settings)
    for temperature in (0.0, 1.5):
        plain = SamplingParams(temperature=temperature, max_tokens=options.max_tokens)
        given = enumerate(asked)
        params = [dataclasses.replace(plain, seed=i, structured_outputs={"json": schema}) for i, schema in given]
        full, drafted = (llm.generate(["ROMEO:"] * len(asked), params) for llm in (batch, drafts))
        alone = [batch.generate(["ROMEO:"], each)[0] for each in params[: options.alone]]
        same = _bits(full) == _bits(drafted) and _bits(full)[: len(alone)] == _bits(alone)
        row = {"model": model.name, "temperature": temperature, "same_bits": same, "alone": len(alone)}
        yield row | _checked(full, asked)


def hostile(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure gaps between tokens of neighbours, in turns: next to unconstrained requests and hostile grammars."""
    settings = {"max_num_seqs": 8, "max_model_len": 2048, "structured_output_helpers": options.helpers}
    if options.apart:
        _part()
    llm = LLM("demo", show_progress=False, **settings)
    gaps, ratios = collections.defaultdict[str, list[list[float]]](list), list[float]()
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=_BESIDE, ignore_eos=True)
    # Built in advance: serialising a large grammar is the work of the API server, not of a step.
    asked = [dataclasses.replace(plain, structured_outputs=each) for each in HOSTILE]
    for turn in range(options.rounds + 1):
        ways = [("plain", [plain]), ("hostile", asked)]
        for name, others in ways if turn % 2 else reversed(ways):
            gaps[name].append(_gaps(llm, others, options.max_tokens))
        if turn:
            ratios.append(_p99(gaps["hostile"][-1]) / _p99(gaps["plain"][-1]))
    times = {name: 1e3 * _p99([gap for turn in each[1:] for gap in turn]) for name, each in gaps.items()}
    row = {"ratio": statistics.median(ratios), "error": error_of_median(ratios), "apart": options.apart}
    return [row | {"of_all": times["hostile"] / times["plain"]} | {f"{name}_p99_ms": times[name] for name in times}]


def _part() -> None:
    """Give helpers the last core, and this process the other cores."""
    *cores, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores)

    class Apart(Helper):
        def start(self) -> bool:
            started = super().start()
            assert self._process is not None
            for thread in os.listdir(f"/proc/{self._process.pid}/task") if started else ():
                os.sched_setaffinity(int(thread), {last})
            return started

    changed: Any = masks_module
    changed.Helper = Apart


_BESIDE = 100  # tokens: about a second, as long as a hostile grammar takes, so that equally many requests come and go


HOSTILE: tuple[dict[str, Any], ...] = (
    {"json": {"enum": [f"value {i}" for i in range(50_000)]}},
    {"regex": "(a|b)*a(a|b){20}"},
    {"json": {"type": "object", "properties": {f"{'p' * 20}{i}": {"type": "string"} for i in range(20_000)}}},
    {"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(50_000))},
    {"regex": "([a-z]{1,500}){1,500}"},
)
"""Grammars that use up a helper's second, or are stopped at it."""


def _p99(gaps: Sequence[float]) -> float:
    return statistics.quantiles(gaps, n=100)[98]


def _gaps(llm: LLM, others: Sequence[SamplingParams], length: int) -> list[float]:
    """Return the seconds between tokens of four neighbours. Two of ``others`` are active at any time."""
    engine, asked, number = llm.engine, itertools.cycle(others), itertools.count()
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=4 * length, ignore_eos=True)
    last, gaps, beside = dict[str, float](), list[float](), set[str]()
    for neighbour in range(4):
        engine.add(Request(f"n{neighbour}", (10 + neighbour,), plain))
    running = 4
    while running:
        while len(beside) < 2:
            name = f"o{next(number)}"
            beside.add(name)
            engine.add(Request(name, (9,), next(asked)))
        for delta in engine.step():
            now = time.perf_counter()
            if delta.request_id in beside:
                beside -= {delta.request_id} if delta.finish_reason is not None else set()
                continue
            if delta.request_id in last:
                gaps.append(now - last[delta.request_id])
            last[delta.request_id] = now
            running -= delta.finish_reason is not None
    for name in beside:
        engine.abort(name)
    return gaps


def _checked(outputs: Sequence[RequestOutput], asked: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count the outputs by finish reason, and those that stopped but do not match their schema."""
    ends, wrong = collections.Counter[str](), list[str]()
    for output, schema in zip(outputs, asked, strict=True):
        sample = output.outputs[0]
        ends[str(sample.finish_reason)] += 1
        if sample.finish_reason == "stop":
            try:
                jsonschema.validate(json.loads(sample.text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append(f"{sample.text!r}: {error}"[:500])
    return {"ends": dict(ends), "wrong": wrong}


def _bits(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def _servable(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the schemas that the engine and `jsonschema` support, and the reasons why other schemas are rejected."""
    asked, refused = list[dict[str, Any]](), list[str]()
    for schema in _schemas(options):
        try:
            compiled("json", json.dumps(schema))
            asked.append(schema)
        except GrammarError as error:
            refused.append(str(error))
    return asked, refused


def _why(refused: Sequence[str]) -> dict[str, int]:
    return dict(collections.Counter(reason[:60] for reason in refused).most_common(12))


def _schemas(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.schemas is None:
        return list(SCHEMAS)
    paths = sorted(options.schemas.glob("*.json"))
    chosen = random.Random(0).sample(paths, min(options.count, len(paths)))
    found = (json.loads(path.read_text(encoding="utf-8"))["schema"] for path in chosen)
    return [schema for schema in found if isinstance(schema, dict)]


WAYS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "speed": speed,
    "masks": masks,
    "forced": forced,
    "valid": valid,
    "hostile": hostile,
}

if __name__ == "__main__":
    sys.exit(main())
