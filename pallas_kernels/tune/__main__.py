"""``python -m pallas_kernels.tune``: find the fastest tiles of the Mosaic kernels on this machine's GPU.

Results go to ``pallas_kernels/<op>/tiles.json``, from where the kernels take them, after each shape; Ctrl-C keeps what
was found. Bits of results may change with the file, so what it decided for some options (page size, dtypes, ...) stays
unless ``--anew`` is given. Exit status: 0, all is well; 1, a shape failed; 2, a wrong argument; 3, there is no GPU that
the kernels are for; 4, the GPU did not answer; 130, interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.choice import HOPPER, Target, lowering_target
from pallas_kernels.tune.bench import REFUSALS, DeviceBench
from pallas_kernels.tune.kernels import TUNABLES
from pallas_kernels.tune.problem import candidates
from pallas_kernels.tune.store import Files
from pallas_kernels.tune.tuner import Task, Tuner

SHIPPED = "configurations"
PATIENCE = 60.0  # seconds after the time is up in which the last launch must come back
MULTIPROCESSORS = 132  # for a dry run


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        tasks = _tasks(arguments.op, arguments.shape)
    except ValueError as error:
        parser.error(str(error))
    files = Files(arguments.out)
    if arguments.dry_run:
        _list(tasks)
        return 0
    target = lowering_target()
    if why := _unfit(target):
        print(f"tune: {why}; --dry-run lists what would be swept", file=sys.stderr)
        return 3
    assert target.device_kind is not None
    if arguments.anew:
        for kernel in {task.tunable.kernel for task in tasks}:
            files.forget(target.device_kind, kernel)
    return _tune(target.device_kind, tasks, files, arguments.seconds)


def _tune(device: str, tasks: Sequence[Task], files: Files, seconds: float) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    watchdog = threading.Timer(seconds + PATIENCE, _give_up)
    watchdog.daemon = True
    watchdog.start()
    tuner = Tuner(
        device=device,
        multiprocessors=_multiprocessors(),
        facts=_facts(),
        bench=DeviceBench,
        failures=REFUSALS,
        files=files,
        clock=time.monotonic,
        say=_say,
    )
    finished = tuner.run(tasks, seconds)
    watchdog.cancel()
    return int(bool(tuner.failed)) if finished else 130


def _give_up() -> None:
    """A kernel that waits for itself never comes back, and nothing interrupts JAX while it waits."""
    print("tune: the GPU does not answer; what was found before is written", file=sys.stderr, flush=True)
    os._exit(4)


def _unfit(target: Target) -> str | None:
    if target.platform not in ("gpu", "cuda"):
        return f"there is no GPU here: JAX runs on {target.platform}"
    if target.capability != HOPPER:
        return f"the kernels are for compute capability 9.0, and this GPU ({target.device_kind}) has another"
    return None


def _tasks(prefixes: Sequence[str], shapes: Sequence[str]) -> list[Task]:
    """Every kernel's first shape before any second one: so that little time gives a little of each."""
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
    parser.add_argument("--op", nargs="+", default=[""], metavar="PREFIX", help="only kernels that begin with these")
    parser.add_argument("--seconds", type=float, default=300.0, help="for everything (default 300)")
    parser.add_argument(
        "--shape",
        nargs="+",
        default=[SHIPPED],
        metavar="FIELD=VALUE,...",
        help=f"a kernel's first shape with other fields; or: {SHIPPED}, all that ship (default)",
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write there, not into the package")
    parser.add_argument("--anew", action="store_true", help="forget what was measured of these kernels on such a GPU")
    parser.add_argument("--dry-run", action="store_true", help="list what would be swept, and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
