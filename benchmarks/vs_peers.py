"""jaxinfer compared with other engines: the same checkpoint, prompts and dtype, in turns, in one command.

    python benchmarks/vs_peers.py              everything: about half an hour on two quiet cores
    python benchmarks/vs_peers.py --quick      a few minutes; the figures mean little

See docs/benchmarks.md for what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.peers import machine, report
from benchmarks.peers.checkpoint import BYTES, read_config
from benchmarks.peers.environment import PEERS, CannotRun, Programs, make_oracle, random_folder
from benchmarks.peers.measure import TooShort
from benchmarks.peers.session import Cell, Phase, Session, check_agreement, run_cell
from benchmarks.peers.work import Work
from benchmarks.peers.worker import REPO, PeerDied

DEMO = REPO / "jaxinfer" / "demo" / "target"
CHECK_MODEL = REPO.parent / "shared" / "data" / "models" / "stories260K" / "hf"
RESULTS = REPO / "benchmarks" / "results"
OTHERS_MAY_USE = 0.03  # share of the machine, while figures are taken
IDLE_MAY_USE = 0.01  # of a core: clock ticks at the end of a turn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0, or 2 with a message when it cannot measure."""
    options = parse(arguments)
    machine.keep_to_cores(options.threads)
    oracle = options.oracle_python
    python, absent = (str(oracle.absolute()), {}) if oracle else make_oracle(options.peers)
    try:
        result = measure(options, Programs.of(python), absent)
    except (CannotRun, PeerDied, TooShort) as cause:
        print(f"vs_peers: {cause}", file=sys.stderr)
        return 2
    show(result, options)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. ``--quick`` changes defaults only; explicit options stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", type=_words, default=["demo", "random-125m"], help="demo, random-125m, folders (comma-separated)")
    add("--dtypes", type=_choices(tuple(BYTES)), default=list(BYTES), help="float32,bfloat16")
    add("--batches", type=_numbers, default=[1, 8, 32], help="sequences at once: 1,8,32")
    add("--peers", type=_choices(PEERS), default=list(PEERS), help="jaxinfer,transformers,llama.cpp")
    add("--rounds", type=int, default=5, help="turns of each peer (default 5)")
    add("--prompt-len", type=int, help="prompt tokens of prefill (default: 512 for one sequence, 128 for more)")
    add("--decode-prompt-len", type=int, default=128, help="prompt tokens before decoding (default 128)")
    add("--new-tokens", type=int, default=64, help="tokens to decode (default 64)")
    add("--threads", type=int, default=len(machine.usable_cores()), help="cores for each peer (default: all)")
    add(
        "--oracle-python", type=pathlib.Path, help="with torch, transformers, llama_cpp, gguf (default: .venv-oracle's)"
    )
    add("--check-model", type=pathlib.Path, default=CHECK_MODEL, help="folder on which greedy tokens must agree")
    add("--work-dir", type=pathlib.Path, default=REPO / "build" / "vs_peers", help="random weights, GGUFs, logs")
    add("--out", type=pathlib.Path, help="JSON file (default: benchmarks/results/vs_peers-<cpu>-<date>.json)")
    add("--quick", action="store_true", help="two rounds, short runs, batches 1 and 8, a file only with --out")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(rounds=2, new_tokens=16, batches=[1, 8], prompt_len=64, decode_prompt_len=16)
    options = parser.parse_args(arguments)
    options.work_dir, options.check_model = options.work_dir.resolve(), options.check_model.resolve()
    options.peers = [peer for peer in PEERS if peer in {"jaxinfer", *options.peers}]
    return options


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _choices(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        unknown = [word for word in _words(text) if word not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return _words(text)

    return parse


def measure(options: argparse.Namespace, programs: Programs, absent: dict[str, str]) -> dict[str, Any]:
    """Run all measurements of the options; return one record.

    Raises:
        CannotRun: a model is missing or too short for the prompts, or peers disagree where they must not.
        PeerDied: jaxinfer itself does not run.
        TooShort: too few new tokens to see a steady state.
    """
    options.work_dir.mkdir(parents=True, exist_ok=True)
    folders = {name: _folder(name, options.work_dir) for name in options.models}
    cells = [
        Cell(name, folder, read_config(folder)["vocab_size"], dtype, batch)
        for name, folder in folders.items()
        for dtype in options.dtypes
        for batch in options.batches
    ]
    _refuse_long(cells, options)
    load = os.getloadavg()[0]
    with Session(options.peers, programs, absent, options.work_dir, options.threads) as session:
        if "jaxinfer" in session.absent:
            raise PeerDied(session.absent["jaxinfer"])
        checked = _check(session, options)
        before = _limits(session, options)
        clock = _Others(session)
        taken = [(cell, run_cell(session, cell, _phases(cell, options), options.rounds)) for cell in cells]
        others, seconds = clock.share(options.threads), clock.seconds()
        limits = _best(before, _limits(session, options))
    rows = [report.row(cell, each, limits.get(cell.dtype)) for cell, phases in taken for each in phases]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(options.threads) | {"load_before": load, "used_by_others": others},
        "versions": session.versions,
        "absent": session.absent,
        "method": report.METHOD,
        "limits": {dtype: vars(limit) for dtype, limit in limits.items()},
        "check": checked,
        "seconds": seconds,
        "idle_cpu_seconds": session.idle_cpu_seconds,
        "rows": rows,
    }


def _folder(name: str, work: pathlib.Path) -> pathlib.Path:
    folder = {"demo": DEMO}.get(name) or (random_folder(work) if name == "random-125m" else pathlib.Path(name))
    if not (folder / "config.json").is_file():
        raise CannotRun(f"--models {name}: no config.json in {folder}")
    return folder.resolve()


def _phases(cell: Cell, options: argparse.Namespace) -> list[Phase]:
    prompt = options.prompt_len or (512 if cell.batch == 1 else 128)
    return [Phase("prefill", prompt, 1), Phase("decode", options.decode_prompt_len, options.new_tokens)]


def _refuse_long(cells: Sequence[Cell], options: argparse.Namespace) -> None:
    for cell in cells:
        longest = max(phase.prompt_len + phase.new_tokens for phase in _phases(cell, options))
        limit = Work.of(cell.folder).max_len
        if longest > limit:
            raise CannotRun(f"--models {cell.model}: {longest} tokens are beyond its context of {limit}")


def _check(session: Session, options: argparse.Namespace) -> dict[str, Any]:
    """Compare greedy tokens of all peers on a small trained model in float32, alone and batched."""
    if session.running == ["jaxinfer"] or not (options.check_model / "config.json").is_file():
        return {"skipped": "no peer, or no --check-model"}
    vocab = read_config(options.check_model)["vocab_size"]
    record: dict[str, Any] = {"model": options.check_model.parent.name}
    for batch in (1, 3):
        cell = Cell("check", options.check_model, vocab, "float32", batch)
        for peer, found in check_agreement(session, cell, length=4, new_tokens=48).items():
            if found.first_difference is not None:
                place = f"{options.check_model}, batch {batch}, token {found.first_difference}"
                raise CannotRun(f"{peer} and jaxinfer differ in float32: {place}")
            record[f"{peer}, batch {batch}"] = "48 tokens equal"
    return record


def _limits(session: Session, options: argparse.Namespace) -> dict[str, report.Limits]:
    """Return the best limits that any peer reaches, for each dtype."""
    sizes = {"megabytes": 64, "side": 512} if options.quick else {"megabytes": 256, "side": 2048}
    found: dict[str, report.Limits] = {}
    for dtype in options.dtypes:
        for name in session.running:
            reply = session.ask(name, "limits", dtype=dtype, **sizes)
            if reply:
                found = _best(found, {dtype: report.Limits(**reply)})
    return found


def _best(a: dict[str, report.Limits], b: dict[str, report.Limits]) -> dict[str, report.Limits]:
    both = {dtype: [limits[dtype] for limits in (a, b) if dtype in limits] for dtype in a | b}
    return {
        dtype: report.Limits(max(limit.bandwidth for limit in each), max(limit.gemm for limit in each))
        for dtype, each in both.items()
    }


class _Others:
    """Measure the share of the machine that other programs use from now on."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._start, self._busy, self._own_busy = time.monotonic(), machine.busy_seconds(), session.cpu_seconds()

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def share(self, cores: int) -> float:
        used = (machine.busy_seconds() - self._busy) - (self._session.cpu_seconds() - self._own_busy)
        return max(0.0, used / self.seconds() / cores)


def show(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the table and its notes; save the record if the figures are not doubtful or a file was named."""
    print(report.table(result["rows"], options.peers))
    print("\n" + report.summary(result["rows"]))
    for peer, reason in result["absent"].items():
        print(f"absent: {peer}: {reason}")
    for dtype, limit in result["limits"].items():
        print(f"{dtype}: memory {limit['bandwidth'] / 1e9:.1f} GB/s, GEMM {limit['gemm'] / 1e9:.0f} GFLOP/s")
    doubts = _doubts(result)
    print("".join(f"{doubt}\n" for doubt in doubts), end="")
    out = options.out
    if out is None and not options.quick and not doubts:
        out = RESULTS / f"vs_peers-{machine.slug(result['machine']['cpu'])}-{result['date'][:10]}.json"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"kept in {out}")


def _doubts(result: dict[str, Any]) -> list[str]:
    """Return the reasons to doubt the figures."""
    doubts = [
        f"NOT FAIR: {peer} used {seconds:.1f} s of CPU time while others were measured"
        for peer, seconds in result["idle_cpu_seconds"].items()
        if seconds > IDLE_MAY_USE * result["seconds"]
    ]
    others = result["machine"]["used_by_others"]
    if others > OTHERS_MAY_USE:
        doubts.append(f"NOT QUIET: other programs used {others:.0%} of the machine; measure again when it is idle")
    return doubts


if __name__ == "__main__":
    sys.exit(main())
