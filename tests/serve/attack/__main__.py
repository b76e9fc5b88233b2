"""Command line of the attacks that run for a given time: `python -m tests.serve.attack chaos --seconds 600`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import pathlib
import random
import secrets
import signal
import sys
import tempfile

from tests.serve.attack import chaos, corpus, fuzzing
from tests.serve.attack.jobs import Jobs, KnownJobs
from tests.serve.attack.victim import victim


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.attack", description=__doc__)
    attacks = parser.add_subparsers(required=True)
    one = attacks.add_parser("chaos", help="faults at random under load")
    one.add_argument("--seconds", type=float, default=60.0)
    one.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    one.add_argument("--model", default="fake", help="fake (default), or what jaxinfer.serve is to load")
    one.add_argument("--out", type=pathlib.Path, help="where the report goes as JSON")
    one.set_defaults(run=_chaos)
    one = attacks.add_parser("fuzz", help="requests that are wrong, at every door")
    one.add_argument("--cases", type=int, default=20_000)
    one.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    one.add_argument("--corpus", type=pathlib.Path, default=corpus.FILE, help="it grows by what shows something new")
    one.add_argument("--replay", type=pathlib.Path, help="requests of this file alone")
    one.set_defaults(run=_fuzz)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that mounted disks are removed
    return int(options.run(options))


def _chaos(options: argparse.Namespace) -> bool:
    seed = secrets.randbelow(10**9) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory(prefix="attack-") as folder, victim(pathlib.Path(folder), options.model) as found:
        report = asyncio.run(_attacked(found, options.model, options.seconds, seed))
    print("\n".join(report.lines()))
    if options.out is not None:
        options.out.write_text(json.dumps({**dataclasses.asdict(report), "model": options.model}, indent=1) + "\n")
    return bool(report.wrong())


def _fuzz(options: argparse.Namespace) -> bool:
    seed = secrets.randbelow(10**9) if options.seed is None else options.seed
    known, failed = corpus.Corpus(options.replay or options.corpus), pathlib.Path("fuzz-failed.jsonl").absolute()
    print(f"fuzz: seed {seed}, corpus {len(known)}")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attack-")))
        if options.replay is None:
            stack.callback(lambda: print(f"{known.save()} new in {options.corpus}"))
        target = stack.enter_context(fuzzing.fuzzed_server(folder))
        found = asyncio.run(fuzzing.run(*target, known, 0 if options.replay else options.cases, seed, failed))
    print(", ".join(f"{kind}: {count}" for kind, count in found.most_common()))
    return False


async def _attacked(found, model: str, seconds: float, seed: int) -> chaos.Report:
    jobs = Jobs()
    if model != "fake":
        jobs = KnownJobs(random.Random(seed))
        await jobs.learn(found)
    return await chaos.run(found, jobs, seconds, seed)


if __name__ == "__main__":
    sys.exit(main())
