"""Latency of text requests served together with images, over that of the same text requests alone.

    python benchmarks/images_beside_text.py                 some five minutes on two idle cores
    python benchmarks/images_beside_text.py --share 0.3     more images: 30 % of all requests
    python benchmarks/images_beside_text.py --out FILE

A server of `demo-vision` in processes of its own, as in production: helpers decode and resize the images. Its processor
takes images of up to 152,880 pixels here: one of 640 x 480 becomes 504 patches, 126 tokens. Text requests arrive at
random (Poisson, open loop), at a small part of the rate that the server can take. Three loads take turns in one run. In
a round they have the same text requests at the same times, and texts and images are new in each turn: the prefix cache
has no hits.

    alone     the text requests, nothing else
    images    beside them requests with one image (a JPEG file) and a question
    tokens    text requests in place of those with images, at the same times, of the same number of tokens

The goal is about `images` over `alone`. That ratio has two causes: there is more work, and images are work of another
kind. `tokens` has the first one alone, so `images` over `tokens` is what images cost beyond their tokens. One gap in a
hundred between tokens of a request is one in which another request's prompt is computed, in all three loads: with
shorter prompts or a lower rate there are fewer such gaps than that in `alone`, and the ratio says little.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
from PIL import Image

import jaxinfer
from benchmarks.peers import machine
from benchmarks.serving.started import started
from benchmarks.traces import record
from jaxinfer.bench.drive import Driver, Prepared
from jaxinfer.bench.grpc_target import GrpcTarget
from jaxinfer.bench.load import arrivals
from jaxinfer.bench.record import Record
from jaxinfer.bench.target import Access, Item, Sampling
from jaxinfer.protos.v1 import inference_pb2 as pb

GOAL = 1.3
LOADS = ("alone", "images", "tokens")
FIGURES: dict[str, Callable[[Record], list[Any]]] = {"itl": lambda each: each.gaps, "ttft": lambda each: [each.ttft]}
"""Samples of a request: gaps between tokens (inter-token latency), and the time to the first token."""
_DEMO = pathlib.Path(jaxinfer.__file__).parent / "demo" / "vision"
_PIXELS, _SOURCE = 152_880, (640, 480)
_TIMEOUT = 60.0

Make = Callable[[np.random.Generator], pb.GenerateRequest]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0, or 1 if a request fails."""
    options, quiet = parse(arguments), record.Quiet()
    with model() as folder, started("--model", folder, "--max-num-seqs", str(options.slots)) as target:
        turns = asyncio.run(measure(target, options))
    cores = len(machine.usable_cores())
    result = record.base(options, cores, quiet.others(cores)) | summary(turns)
    print("\n".join([*table(result), *record.doubts(result)]))
    if options.out is not None:
        record.keep(result, options.out)
    return int(any(result["failed"].values()))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rate", type=float, default=8.0, help="text requests a second (default 8)")
    add("--share", type=float, default=0.2, help="images among all requests (default 0.2)")
    add("--prompt", type=int, default=512, help="tokens of a text request's prompt (default 512)")
    add("--output", type=int, default=64, help="tokens of each answer (default 64)")
    add("--slots", type=int, default=16, help="max_num_seqs of the server (default 16)")
    add("--rounds", type=int, default=4, help="turns of each load (default 4)")
    add("--seconds", type=float, default=20.0, help="of each turn (default 20)")
    add("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


@contextlib.contextmanager
def model() -> Iterator[str]:
    """Make a folder of the demo model whose processor takes larger images."""
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(shutil.copytree(_DEMO, pathlib.Path(parent, "demo-vision")))
        path = folder / "preprocessor_config.json"
        fields = json.loads(path.read_text())
        fields["size"]["longest_edge"] = _PIXELS
        path.write_text(json.dumps(fields))
        yield str(folder)


# ---- requests


def text(tokens: int, output: int) -> Make:
    def make(draw: np.random.Generator) -> pb.GenerateRequest:
        ids = pb.TokenIds(ids=draw.integers(10, 200, tokens).tolist())
        return pb.GenerateRequest(token_ids=ids, sampling=_sampling(output))

    return make


def with_image(output: int) -> Make:
    def make(draw: np.random.Generator) -> pb.GenerateRequest:
        parts = [pb.Content(image=pb.Image(data=picture(draw))), pb.Content(text="What is this?")]
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", parts=parts)])
        return pb.GenerateRequest(chat=chat, sampling=_sampling(output))

    return make


def _sampling(output: int) -> pb.SamplingParams:
    return pb.SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, seed=0)


def picture(draw: np.random.Generator) -> bytes:
    """Return a JPEG file of smooth colours with some noise: its size is that of a photograph."""
    coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), np.uint8)).resize(_SOURCE, Image.Resampling.BICUBIC)
    noisy = np.asarray(coarse, np.int16) + draw.integers(-12, 13, (*_SOURCE[::-1], 3))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def prepared(rate: float, seconds: float, times: int, make: Make, contents: list[int]) -> list[Prepared]:
    """Return the requests of a turn. The seed ``times`` is that of their arrivals, ``contents`` that of the rest."""
    draw, item = np.random.default_rng(contents), Item([], 0, 0)
    due = itertools.takewhile(lambda at: at < seconds, arrivals(rate, 1.0, np.random.default_rng(times)))
    return [Prepared(item, make(draw).SerializeToString(), at) for at in due]


# ---- turns


async def measure(address: str, options: argparse.Namespace) -> list[dict[str, list[Record]]]:
    """Return the records of the text requests, of each round by load. A round before the first one warms up."""
    target = GrpcTarget(Access(f"grpc://{address}"), Sampling())
    await target.open()
    probe = await target.stream(with_image(1)(np.random.default_rng(0)).SerializeToString(), lambda _: None)
    assert probe.prompt_tokens is not None
    beside = {"images": with_image(options.output), "tokens": text(probe.prompt_tokens, options.output)}
    turns = []
    for number in range(options.rounds + 1):
        order = LOADS[number % 3 :] + LOADS[: number % 3]
        turns.append({name: await turn(target, name, number, beside.get(name), options) for name in order})
    await target.close()
    return turns[1:]


async def turn(
    target: GrpcTarget, load: str, number: int, beside: Make | None, options: argparse.Namespace
) -> list[Record]:
    """Run a load; return the records of its text requests."""
    seconds, seed = options.seconds if number else min(5.0, options.seconds), [number, LOADS.index(load)]
    texts = prepared(options.rate, seconds, 2 * number, text(options.prompt, options.output), [*seed, 0])
    rate = options.rate * options.share / (1 - options.share)
    others = [] if beside is None else prepared(rate, seconds, 2 * number + 1, beside, [*seed, 1])
    drivers = [Driver(target, asyncio.get_running_loop().time, _TIMEOUT) for _ in range(2)]
    await asyncio.gather(*(driver.open_loop(each) for driver, each in zip(drivers, (texts, others), strict=True)))
    if failed := [each.error for driver in drivers for each in driver.records if each.error_kind is not None]:
        print(f"{load}: {len(failed)} requests failed: {failed[0]}", file=sys.stderr)
    return drivers[0].records


# ---- figures


def summary(turns: Sequence[dict[str, list[Record]]]) -> dict[str, Any]:
    """Return the percentiles of each load in milliseconds, of all its turns together, and their ratios."""
    kept = {load: [each for turn in turns for each in turn[load] if each.error_kind is None] for load in LOADS}
    found = {load: {name: _percentiles(kept[load], name) for name in FIGURES} for load in LOADS}
    failed = {load: sum(len(turn[load]) for turn in turns) - len(kept[load]) for load in LOADS}
    ratios = {f"images/{base}": _ratios(found["images"], found[base]) for base in ("alone", "tokens")}
    rounds = [_ratios(*({n: _percentiles(turn[load], n) for n in FIGURES} for load in LOADS[1::-1])) for turn in turns]
    requests = {load: len(kept[load]) for load in LOADS}
    return {"requests": requests, "failed": failed, "ms": found, "ratios": ratios, "rounds": rounds, "goal": GOAL}


def _percentiles(records: Sequence[Record], figure: str) -> dict[str, float]:
    values = [value for each in records for value in FIGURES[figure](each) if value is not None]
    p50, p99 = (1e3 * np.percentile(values, (50, 99))).tolist()
    return {"p50": p50, "p99": p99}


def _ratios(over: dict[str, dict[str, float]], under: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {of: over[name][of] / under[name][of] for of in over[name]} for name in over}


def table(result: dict[str, Any]) -> list[str]:
    """Format a Markdown table."""
    lines = ["| text requests | ITL p50 | p99 | TTFT p50 | p99 |", "|---|---|---|---|---|"]
    for unit, rows in (("ms", result["ms"]), ("", result["ratios"])):
        for name, row in rows.items():
            cells = (f"{row[figure][of]:.2f}" for figure in FIGURES for of in ("p50", "p99"))
            lines.append(f"| {name}{unit and ', ' + unit} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
