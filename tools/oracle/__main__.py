"""Command line of the oracle: ``python -m tools.oracle {make,check,list}`` from the repository root."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from tools.oracle.cases import CASES, Case
from tools.oracle.golden import Golden, load, names
from tools.oracle.run import DECODE_STEPS, ask, make

REPRODUCED = 1e-10  # tolerance of float64 logits of order one, summed in another order


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    options = _parser().parse_args(arguments)
    return options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.oracle", description=__doc__)
    commands = parser.add_subparsers(required=True)
    make_parser = commands.add_parser("make", help="write golden files")
    make_parser.add_argument("--out", type=pathlib.Path, required=True, help="folder; one sub-folder a case")
    make_parser.add_argument("--seed", type=int, default=1, help="first seed that is tried (1: the committed files)")
    make_parser.add_argument("--case", action="append", default=[], help="name of a case; repeat it; all by default")
    make_parser.set_defaults(command=_make)
    check_parser = commands.add_parser("check", help="compute committed files again and compare")
    check_parser.add_argument("folder", type=pathlib.Path)
    check_parser.set_defaults(command=_check)
    commands.add_parser("list", help="names of the cases").set_defaults(command=_list)
    return parser


def _pick(wanted: Sequence[str]) -> list[Case]:
    unknown = set(wanted) - {case.name for case in CASES}
    if unknown:
        raise SystemExit(f"unknown case {', '.join(sorted(unknown))}; `list` prints the known ones")
    return [case for case in CASES if not wanted or case.name in wanted]


def _make(options: argparse.Namespace) -> int:
    for case in _pick(options.case):
        golden = make(case, options.seed)
        golden.save(options.out)
        print(_line(golden), flush=True)
    return 0


def _line(golden: Golden) -> str:
    return (
        f"{golden.name:32} seed {golden.seed:<6} margin {golden.margin:.3f}  distinct {len(set(golden.greedy)):2}  "
        f"float32 error: prefill {golden.prefill_error:.1e}, decode {golden.decode_error.min():.1e}.."
        f"{golden.decode_error.max():.1e}  largest logit {np.abs(golden.decode).max():.1f}"
    )


def _check(options: argparse.Namespace) -> int:
    known = {case.name: case for case in CASES}
    stored = names(options.folder)
    wrong = [f"{name}: not the same set of cases" for name in set(known) ^ set(stored)]
    wrong += [
        line for name in stored if name in known for line in _differences(known[name], load(options.folder / name))
    ]
    print("\n".join(wrong) or f"{len(stored)} cases of {DECODE_STEPS} decode steps reproduced")
    return 1 if wrong else 0


def _differences(case: Case, stored: Golden) -> list[str]:
    fresh = ask(case, stored.seed)
    if fresh is None:
        return [f"{case.name}: seed {stored.seed} is not acceptable any more"]
    same = ("config", "shards", "shapes", "weights_sha256", "prompt", "greedy")
    wrong = [f"{case.name}: {key} differs" for key in same if getattr(fresh, key) != getattr(stored, key)]
    for key in ("prefill", "decode"):
        off = float(np.abs(getattr(fresh, key) - getattr(stored, key)).max())
        wrong += [f"{case.name}: {key} is off by {off:.1e}"] if off > REPRODUCED else []
    return wrong


def _list(options: argparse.Namespace) -> int:
    print("\n".join(case.name for case in CASES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
