"""``python -m pallas_kernels.check``: compile every shipped kernel to machine code. It needs no GPU.

Prints registers, spills, shared memory and, with a disassembler, counts of important instructions. Exit status: 0, no
failures; 1, a kernel failed or spills, or nothing matched; 2, a wrong argument; 3, JAX's CUDA plugin is missing.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from pallas_kernels.check.launch import compiling
from pallas_kernels.check.ops import shipped
from pallas_kernels.check.plugins import PluginsMissing, default_folder, disassembler, environment, require_plugins
from pallas_kernels.check.report import Outcome, as_markdown, as_table
from pallas_kernels.check.target import TARGETS
from pallas_kernels.specs import Spec, forgotten


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    folder = arguments.plugins or default_folder()
    try:
        require_plugins(folder)
    except PluginsMissing as error:
        print(f"check: {error}", file=sys.stderr)
        return 3
    specs = [one for one in shipped(arguments.op) if arguments.name in one.name]
    work = _matching(specs, arguments.target or tuple(TARGETS), named=bool(arguments.target))
    if not work:
        print("check: no configuration matches", file=sys.stderr)
        return 1
    launcher = compiling(environment(folder), disassembler(folder), arguments.jobs, arguments.keep)
    outcomes = launcher.run(_sample(work, arguments.every))
    if arguments.json:
        arguments.json.write_text(json.dumps([one.as_json() for one in outcomes], indent=1) + "\n", encoding="utf-8")
    print(as_markdown(outcomes) if arguments.markdown else as_table(outcomes))
    return _verdict(outcomes, [name for name in forgotten() if name.startswith(tuple(arguments.op))])


def _matching(specs: Sequence[Spec], targets: Sequence[str], *, named: bool) -> list[tuple[Spec, str]]:
    work = []
    for target in targets:
        its = [(one, target) for one in specs if target in one.targets]
        if named and not its:
            print(f"{target}: no configuration ships for it", file=sys.stderr)
        work += its
    return work


def _sample(work: Sequence[tuple[Spec, str]], every: int) -> list[tuple[Spec, str]]:
    """Take one of every N configurations of each op and target, at least one."""
    seen = collections.Counter[tuple[str, str]]()
    chosen = []
    for one, target in work:
        if seen[one.op, target] % every == 0:
            chosen.append((one, target))
        seen[one.op, target] += 1
    return chosen


def _verdict(outcomes: Sequence[Outcome], without: Sequence[str]) -> int:
    failed = [one for one in outcomes if one.failure]
    for one in failed:
        print(f"\nFAILED {one.op} {one.name} {one.target}: {one.failure}", file=sys.stderr)
    for name in without:
        print(f"\nFAILED {name}: it has a Mosaic kernel, but no {name}/arg_specs.py", file=sys.stderr)
    kernels = sum(len(one.kernels) for one in outcomes)
    print(f"\n{len(outcomes)} configurations, {kernels} kernels, {len(failed)} failed", file=sys.stderr)
    return int(bool(failed or without))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", nargs="+", default=[""], metavar="PREFIX", help="only ops with one of these prefixes")
    parser.add_argument("--name", default="", metavar="PART", help="only configurations whose names contain PART")
    parser.add_argument(
        "--target", nargs="+", default=[], choices=TARGETS, help="only these GPU targets (default: all)"
    )
    parser.add_argument(
        "--every", type=_positive, default=1, metavar="N", help="sample: one of N configurations (default: all)"
    )
    parser.add_argument("--plugins", type=pathlib.Path, metavar="DIR", help="folder of JAX's CUDA plugin")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="file to which results are also written")
    parser.add_argument(
        "--keep", type=pathlib.Path, metavar="DIR", help="folder in which PTX and machine code are kept"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="number of parallel processes")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
