"""``python -m pallas_kernels.tune``: find the fastest tiles of the Mosaic kernels on this machine's GPU.

Results are written to ``pallas_kernels/<op>/tiles.json``, where the kernels read them, after each shape; Ctrl-C keeps
results so far. The file may change bits of results, so its choice for some options (page size, dtypes, ...) stays
unless ``--anew`` is given. Exit status: 0, no failures; 1, a shape failed; 2, a wrong argument; 3, there is no GPU that
the kernels support; 4, nothing ran, because every candidate hung or died; 130, interrupted.

The search runs in a subprocess. If it hangs or dies, the running candidate is skipped, and a new process continues.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pallas_kernels.choice import HOPPER, Target, lowering_target
from pallas_kernels.specs import Problem
from pallas_kernels.supervise import Ended, Journal, supervise
from pallas_kernels.tune.bench import REFUSALS, DeviceBench
from pallas_kernels.tune.kernels import TUNABLES
from pallas_kernels.tune.search import Bench, candidates
from pallas_kernels.tune.steps import SteppedBench
from pallas_kernels.tune.store import Files
from pallas_kernels.tune.tuner import Task, Tuner

SHIPPED = "configurations"
MULTIPROCESSORS = 132  # for a dry run
COMMAND = (sys.executable, "-m", "pallas_kernels.tune")
GRACE_S = 30.0  # limit for a process to exit after Ctrl-C, its last launch included
UNFIT, NOWHERE, INTERRUPTED = 3, 4, 130


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments = parser.parse_args(words)
    try:
        tasks = _tasks(arguments.op, arguments.shape)
    except ValueError as error:
        parser.error(str(error))
    if arguments.dry_run:
        _list(tasks)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return _supervise(words, arguments) if arguments.journal is None else tune(arguments, tasks)


# ---- the supervising process


def _supervise(words: Sequence[str], arguments: argparse.Namespace) -> int:
    """Search in a subprocess; after one that hung or died, in another one with the time that is left."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(pathlib.Path(folder, "journal"))

        def child(left: float, alone: bool) -> subprocess.Popen[bytes]:
            seconds = str(max(0.0, left - arguments.patience))
            command = [*COMMAND, *words, "--journal", str(journal.path), "--seconds", seconds]
            return subprocess.Popen(command, start_new_session=True)

        # The last launch may begin when the time is up.
        seconds, final = arguments.seconds + arguments.patience, (0, UNFIT, INTERRUPTED)
        try:
            ended = supervise(child, journal, seconds=seconds, patience=arguments.patience, final=final, grace=GRACE_S)
        except KeyboardInterrupt:
            return INTERRUPTED
        return _status(ended, list(journal.lines()))


def _status(ended: Ended, lines: Sequence[Mapping[str, Any]]) -> int:
    if ended.code in (UNFIT, INTERRUPTED):
        return ended.code
    if ended.why:
        print(f"tune: {ended.why}; what was found before is written", file=sys.stderr)
    faults = ended.why or any("condemned" in line for line in lines)
    if faults and not any("sampled" in line for line in lines):
        return NOWHERE
    return int(bool(ended.why) or any("failed" in line for line in lines))


# ---- the searching process


def tune(
    arguments: argparse.Namespace,
    tasks: Sequence[Task],
    bench: Callable[[Problem, frozenset[str]], Bench] = DeviceBench,
) -> int:
    """Tune the tasks that no earlier process has finished."""
    target = lowering_target()
    if why := _unfit(target):
        print(f"tune: {why}; --dry-run lists what would be swept", file=sys.stderr)
        return UNFIT
    assert target.device_kind is not None
    files, journal = Files(arguments.out), Journal(arguments.journal)
    if arguments.anew and not any("forgot" in line for line in journal.lines()):
        for kernel in {task.tunable.kernel for task in tasks}:
            files.forget(target.device_kind, kernel)
        journal.put(forgot=True)
    tuner = Tuner(
        device=target.device_kind,
        multiprocessors=_multiprocessors(),
        facts=_facts(),
        bench=lambda task, problem: SteppedBench(bench(problem, task.tunable.bits), str(task), journal),
        failures=REFUSALS,
        files=files,
        clock=time.monotonic,
        say=_say,
        journal=journal,
    )
    return 0 if tuner.run(_left(tasks, journal), arguments.seconds) else INTERRUPTED


def _left(tasks: Sequence[Task], journal: Journal) -> list[Task]:
    """Return tasks that no earlier process finished, or hung or died in before their first candidate."""
    known = journal.progress()
    for name, why in known.condemned.items():
        if name in map(str, tasks) and not any(line.get("failed") == name for line in journal.lines()):
            _say(f"{name}: failed: {why}")
            journal.put(failed=name, why=why)
    return [task for task in tasks if str(task) not in known.ended | known.condemned.keys()]


def _unfit(target: Target) -> str | None:
    if target.platform not in ("gpu", "cuda"):
        return f"there is no GPU here: JAX runs on {target.platform}"
    if target.capability != HOPPER:
        return f"the kernels are for compute capability 9.0, and this GPU ({target.device_kind}) has another"
    return None


def _tasks(prefixes: Sequence[str], shapes: Sequence[str]) -> list[Task]:
    """Return every kernel's first shape before any second one, so that a short run covers all kernels."""
    tunables = [one for one in TUNABLES if one.kernel.startswith(tuple(prefixes))]
    if not tunables:
        raise ValueError(f"no kernel begins with {' or '.join(prefixes)}: {', '.join(one.kernel for one in TUNABLES)}")
    chosen = [
        [shape for text in shapes for shape in (one.shapes if text == SHIPPED else (one.shape(text),))]
        for one in tunables
    ]
    longest = max(map(len, chosen))
    pairs = [(one, its) for one, its in zip(tunables, chosen, strict=True)]
    return [Task(one, its[index]) for index in range(longest) for one, its in pairs if index < len(its)]


def _list(tasks: Sequence[Task]) -> None:
    for task in tasks:
        problem = task.tunable.problem(task.shape, MULTIPROCESSORS)
        print(f"{task}: {len(candidates(problem, {}))} candidates, beginning with {problem.heuristic}")


def _multiprocessors() -> int:
    return int(getattr(jax.local_devices()[0], "core_count", MULTIPROCESSORS))


def _facts() -> dict[str, Any]:
    return {
        "jax": jax.__version__,
        "platform": jax.local_devices()[0].client.platform_version.replace("\n", " "),
        "date": datetime.date.today().isoformat(),
    }


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--op", nargs="+", default=[""], metavar="PREFIX", help="only kernels with one of these prefixes"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of the whole search (default 300)")
    parser.add_argument(
        "--shape",
        nargs="+",
        default=[SHIPPED],
        metavar="FIELD=VALUE,...",
        help=f"first shape of a kernel with these fields changed, or {SHIPPED}: all shipped shapes (default)",
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="output file, instead of the package's files")
    parser.add_argument(
        "--patience",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds after which a candidate counts as hung (default 30)",
    )
    parser.add_argument("--journal", type=pathlib.Path, help=argparse.SUPPRESS)  # of a searching process
    parser.add_argument(
        "--anew", action="store_true", help="discard earlier results of these kernels on this GPU model"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the planned searches and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
