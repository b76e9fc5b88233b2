"""Prefix cache hits of replicas behind SMG on the Mooncake trace, by routing policy.

    python benchmarks/routing.py --smg build/fleet/bin/smg --out FILE.json     some minutes

Three fleets serve the same requests in the same order: one replica with a cache of twice the size, two to four behind
SMG that routes by their KV events (cache_aware), and as many behind SMG with round robin (round_robin). The replicas
have no device: scheduler, page allocator, journal and APIs are real. A block of the trace is one page, and prompts are
scaled with it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import pathlib
import random
import socket
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.routed import core
from benchmarks.routed.replica import Looked, Replica, running
from benchmarks.traces import record
from jaxinfer.bench.traces import TraceRequest, read_mooncake, scale_mooncake

_TRACE = pathlib.Path(__file__).resolve().parents[2] / "shared/data/traces/mooncake_synthetic.jsonl"
_SECONDS = 120.0
GOALS = {"hits": 0.95, "prefilled": 1.5}
"""Goals: hits over those of one replica with twice the cache; tokens prefilled with round robin over events."""


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A named fleet: the number of replicas, the pages of each, and SMG's routing policy."""

    name: str
    replicas: int
    pages: int
    policy: str
    options: tuple[str, ...] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options = parse(arguments)
    quiet = record.Quiet()
    trace = scale_mooncake(read_mooncake(options.trace)[options.skip :], core.CONTEXT, options.page_size)
    requests = trace.requests[: options.requests]
    fleets = [
        Fleet("one of twice the size", 1, 2 * options.pages, "round_robin"),
        Fleet("by events", options.replicas, options.pages, "cache_aware", tuple(options.option)),
        Fleet("going round", options.replicas, options.pages, "round_robin"),
    ]
    rows = [{**dataclasses.asdict(fleet), **serve(fleet, requests, options)} for fleet in fleets]
    result = record.base(options, 1, quiet.others(1)) | {"requests": len(requests), "rows": rows, **judged(rows)}
    print("\n".join(table(rows)))
    print(json.dumps(result["verdict"], indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(each["reached"] for each in result["verdict"].values()) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--smg", type=pathlib.Path, default=pathlib.Path("build/fleet/bin/smg"), help="the router (build/fleet/bin/smg)"
    )
    add("--trace", type=pathlib.Path, default=_TRACE, help="the Mooncake trace")
    add("--skip", type=int, default=3000, help="requests of the trace before the first one (default 3000)")
    add("--requests", type=int, default=993, help="requests (default 993)")
    add("--pages", type=int, default=4000, help="pages of each of them (default 4000)")
    add("--replicas", type=int, default=2, help="replicas behind the router (default 2)")
    add("--page-size", type=int, default=16, help="tokens of a page, which is a block of the trace (default 16)")
    add("--outstanding", type=int, default=4, help="requests at once (default 4)")
    add("--option", action="append", default=[], help="of SMG, where it goes by events: --option=--cache-threshold=0.5")
    add("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the two figures and their goals."""
    one, events, around = rows
    figures = {
        "hits": events["hit_rate"] / one["hit_rate"],
        "prefilled": around["prefilled"] / events["prefilled"],
    }
    verdict = {
        name: {"figure": figure, "goal": GOALS[name], "reached": figure >= GOALS[name]}
        for name, figure in figures.items()
    }
    return {"verdict": verdict}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format the lines to print."""
    return [
        f"{row['name']:24} hit rate {row['hit_rate']:.4f}, prefilled {row['prefilled']:8} tokens, "
        f"{row['seconds']:.0f} s, of each {row['shares']}"
        for row in rows
    ]


def serve(fleet: Fleet, requests: Sequence[TraceRequest], options: argparse.Namespace) -> dict[str, Any]:
    """Send a fleet the requests in order, with bounded concurrency, and count hits and tokens."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        core.write_tokenizer(folder)
        replicas = [
            stack.enter_context(running(str(folder), fleet.pages, 2 * options.outstanding, options.page_size))
            for _ in range(fleet.replicas)
        ]
        url = stack.enter_context(router(options.smg, fleet, replicas, folder / "smg.log"))
        before = [replica.looked() for replica in replicas]
        start = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(options.outstanding) as pool:
            statuses = collections.Counter(pool.map(lambda each: ask(url, each, options.page_size), requests))
        seconds = time.monotonic() - start
        shares = [_less(replica.looked(), was) for replica, was in zip(replicas, before, strict=True)]
    whole = sum(shares, Looked())
    return {
        "answers": dict(statuses),
        "hit_rate": whole.hits / whole.queries,
        "prefilled": whole.queries - whole.hits,
        "seconds": seconds,
        "shares": [share.queries for share in shares],
    }


def _less(now: Looked, before: Looked) -> Looked:
    return Looked(now.queries - before.queries, now.hits - before.hits)


def ask(url: str, request: TraceRequest, page_size: int) -> int:
    """Send one request; return its status."""
    body = {"model": core.NAME, "prompt": prompt(request, page_size), "max_tokens": request.output_len}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:
        answer.read()
        return int(answer.status)


def prompt(request: TraceRequest, page_size: int) -> str:
    """Return a text of ``prompt_len`` tokens; equal blocks have equal text."""
    blocks = (random.Random(block).choices(string.ascii_letters, k=page_size) for block in request.blocks)
    return "".join(letter for block in blocks for letter in block)[: request.prompt_len]


@contextlib.contextmanager
def router(program: pathlib.Path, fleet: Fleet, replicas: Sequence[Replica], log: pathlib.Path) -> Iterator[str]:
    """Start SMG in front of the replicas; yield its address once it knows them all."""
    port, metrics = free_port(), free_port()
    workers = [f"grpc://127.0.0.1:{replica.grpc_port}" for replica in replicas]
    addresses = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
    arguments = [*addresses, "--prometheus-port", str(metrics), "--policy", fleet.policy, *fleet.options]
    with log.open("wb") as output:
        command = [str(program.resolve()), "launch", *arguments, "--worker-urls", *workers]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait_for_workers(f"http://127.0.0.1:{port}", len(replicas), log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for_workers(url: str, count: int, log: pathlib.Path) -> None:
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/workers", timeout=_SECONDS) as answer:
            workers = json.load(answer)["workers"]
            told = log.read_text(errors="replace")
            ready = [each for each in workers if each["is_healthy"] and each["model_id"] == core.NAME]
            if len(ready) == count and "Successfully loaded tokenizer" in told:
                return
        time.sleep(0.1)
    raise RuntimeError(f"SMG does not know its workers:\n{log.read_text(errors='replace')[-2000:]}")


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
