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
from benchmarks.peers.session import Cell, Phase, Session, Taken, check_agreement, run_cell
from benchmarks.peers.work import Work
from benchmarks.peers.worker import REPO, PeerDied

DEMO = REPO / "jaxinfer" / "demo" / "target"
CHECK_MODEL = REPO.parent / "shared" / "data" / "models" / "stories260K" / "hf"
RESULTS = REPO / "benchmarks" / "results"
NOISY_ROWS = 0.2  # share of rows that may be noisy in a file that is kept
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
    add("--first", type=_numbers, default=[8, 16, 32, 64, 128, 192], help="prompt tokens of rows of default settings")
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
        parser.set_defaults(rounds=2, new_tokens=16, batches=[1, 8], first=[8, 64], prompt_len=64, decode_prompt_len=16)
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
        Cell(name, folder, read_config(folder)["vocab_size"], dtype, batch, default)
        for name, folder in folders.items()
        for dtype in options.dtypes
        for batch, default in [*([(1, True)] if options.first else []), *((batch, False) for batch in options.batches)]
    ]
    _refuse_long(cells, options)
    load = os.getloadavg()[0]
    with Session(options.peers, programs, absent, options.work_dir, options.threads) as session:
        if "jaxinfer" in session.absent:
            raise PeerDied(session.absent["jaxinfer"])
        checked = _check(session, options)
        clock = _Others(session)
        rows = [row for cell in cells for row in _rows(session, cell, options)]
        others, seconds = clock.share(options.threads), clock.seconds()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(options.threads) | {"load_before": load, "used_by_others": others},
        "versions": session.versions,
        "absent": session.absent,
        "method": report.METHOD,
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
    lengths = options.first if cell.default else [options.prompt_len or (512 if cell.batch == 1 else 128)]
    decode = Phase("decode", options.decode_prompt_len, options.new_tokens)
    return [*(Phase("prefill", length, 1) for length in lengths), decode]


def _rows(session: Session, cell: Cell, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a cell, and just before and after it the limits of the machine and what other programs use."""
    before, clock = _limits(session, options, cell.dtype), _Others(session)
    taken: list[Taken] = run_cell(session, cell, _phases(cell, options), options.rounds)
    others = clock.share(options.threads)
    both = [limits for limits in (before, _limits(session, options, cell.dtype)) if limits is not None]
    return [report.row(cell, each, report.Limits.best(both), others) for each in taken]


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


def _limits(session: Session, options: argparse.Namespace, dtype: str) -> report.Limits | None:
    """Return the best limits that any peer reaches in a dtype."""
    sizes = {"megabytes": 64, "side": 512} if options.quick else {"megabytes": 256, "side": 2048}
    replies = [session.ask(name, "limits", dtype=dtype, **sizes) for name in session.running]
    return report.Limits.best([report.Limits(**reply) for reply in replies if reply])


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
    noisy = sum(row["noise"] is not None for row in result["rows"])
    if noisy > NOISY_ROWS * len(result["rows"]):
        doubts.append(f"NOT QUIET: {noisy} of {len(result['rows'])} rows are noisy; measure again when it is idle")
    return doubts


if __name__ == "__main__":
    sys.exit(main())
