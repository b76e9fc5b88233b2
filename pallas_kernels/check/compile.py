"""Compile configurations for one target, as a separate program: ``python -m pallas_kernels.check.compile``.

A rejected target or kernel may abort the process, and flags must be set before JAX starts. The program appends each
outcome to a file, so that its parent knows how far it came (`launch`).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence

import jax

from pallas_kernels.check.ops import shipped
from pallas_kernels.check.report import Kernel, Outcome, read_dumps
from pallas_kernels.check.target import TARGETS, Target
from pallas_kernels.specs import Spec

SECONDS_EACH = 300  # limit for one kernel, which takes about one second; beyond it the process is killed


def compile_spec(one: Spec, target: Target, dumps: pathlib.Path) -> tuple[Outcome, bool]:
    """Compile one configuration; return its outcome, and whether Mosaic GPU compiled each of its kernels anew.

    A kernel identical to an earlier one of this process is not compiled again, and has no report.

    Args:
        dumps: folder of Mosaic GPU's dumps.
    """
    arguments = one.arguments()
    compiled = target.compile(one.kernel, arguments, donated=one.donated)
    anew = len(list(dumps.glob("*.ptxas"))) == len(list(dumps.glob("*.resources.txt")))
    kernels = read_dumps(dumps) if anew else ()
    donated = sum(x.size * x.dtype.itemsize for i in one.donated for x in jax.tree.leaves(arguments[i]))
    memory = compiled.memory_analysis()
    assert memory is not None
    aliased = memory.alias_size_in_bytes
    return Outcome(one.op, one.name, target.name, kernels, _failure(kernels, target, donated, aliased)), anew


def _failure(kernels: Sequence[Kernel], target: Target, donated: int, aliased: int) -> str:
    """Return the first reason not to ship this, or ""."""
    if not kernels:
        return "no Mosaic kernel was compiled, or one of them twice"
    for kernel in kernels:
        for fault in kernel.faults(target.shared_memory):
            return f"{kernel.name}: {fault}"
    if aliased < donated:
        return f"{donated} bytes are donated, {aliased} of them are updated in place"
    return ""


def _clear(dumps: pathlib.Path, keep: pathlib.Path | None) -> None:
    """Empty the folder (about 20 MB per kernel); copy machine code and reports to ``keep``."""
    for path in dumps.iterdir():
        if keep is not None and path.suffix in (".ptx", ".ptxas", ".sass_ctrl", ".txt"):
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, keep)
        path.unlink()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument(
        "--results", type=pathlib.Path, required=True, help="file to append a line per configuration to"
    )
    parser.add_argument("--cuda-root", help="folder whose bin/ contains nvdisasm")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for PTX, machine code and reports")
    arguments = parser.parse_args(argv)
    wanted = [(op, name) for op, name in json.load(sys.stdin)]
    specs = {(one.op, one.name): one for one in shipped({op for op, _ in wanted})}
    if arguments.cuda_root:  # only now: importing Mosaic GPU, as the kernels have done, overwrites it
        os.environ["MOSAIC_GPU_CUDA_ROOT"] = arguments.cuda_root
    with tempfile.TemporaryDirectory() as folder, arguments.results.open("a", encoding="utf-8") as results:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        for index, pair in enumerate(wanted):
            signal.alarm(SECONDS_EACH)
            outcome, anew = compile_spec(specs[pair], TARGETS[arguments.target], pathlib.Path(folder))
            _clear(pathlib.Path(folder), arguments.keep and arguments.keep / arguments.target / "-".join(pair))
            if index and not anew:
                return  # the next process begins with this configuration
            results.write(json.dumps(outcome.as_json()) + "\n")
            results.flush()


if __name__ == "__main__":
    main()
