"""Oracle of draft heads: runs the original implementations in float64 and in float32 (docs/oracle.md, "Draft heads").

    python -m tools.oracle.heads make --out tests/goldens/heads --eagle DIR --medusa DIR
    python -m tools.oracle.heads check tests/goldens/heads --eagle DIR --medusa DIR
    python -m tools.oracle.heads list

DIR is a checkout of the project that a case names as its original; cases without one are skipped.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import transformers

from tools.oracle import originals, typical
from tools.oracle.cases.heads import CHAIN, HEADS, PAIRS, VOCABULARY, HeadCase
from tools.oracle.golden import digest, make_tensors, names, uniform
from tools.oracle.head_models import Eagle, Head, Medusa, Shapes, SpecForge, Speculators, building, running
from tools.oracle.head_mtp import DeepseekMTP
from tools.oracle.heads_golden import HeadGolden, derive, deviation, read_head

TYPICAL = "typical.npz"
REPRODUCED = 1e-10
SEED_TRIES = 100

Sources = Mapping[str, types.SimpleNamespace]
Arrays = dict[str, np.ndarray]

# By checkout: its importer, and the constructor of a head.
Importer = Callable[[pathlib.Path], types.SimpleNamespace]
_CHECKOUTS: dict[str, tuple[Importer | None, Callable[[Any, HeadCase], Head]]] = {
    "eagle": (originals.eagle, Eagle),
    "medusa": (originals.medusa, Medusa),
    "specforge": (originals.specforge, SpecForge),
    "speculators": (originals.speculators, Speculators),
    "transformers": (None, DeepseekMTP),
}


# --------------------------------------------------------------------------------------------------------------
# one case


def build(case: HeadCase, sources: Sources, dtype: torch.dtype) -> Head:
    _, make_head = _CHECKOUTS[case.checkout]
    with building(dtype):
        return make_head(sources[case.checkout], case)


def inputs(seed: int, width: int, chain: int) -> Arrays:
    """Return features of unit variance [T, width], tokens [T] and tokens of a chain, from ``seed``."""
    features = uniform(seed, "features", (PAIRS, width)) * np.float32(3.0**0.5)
    tokens = _tokens(seed, "tokens", PAIRS)
    return {"features": features.astype(np.float64), "tokens": tokens, "chain_tokens": _tokens(seed, "chain", chain)}


def _tokens(seed: int, name: str, length: int) -> np.ndarray:
    return ((uniform(seed, name, (length,)) + 1.0) / 2.0 * VOCABULARY).astype(np.int64)


def vocabulary_map(seed: int, case: HeadCase) -> dict[str, dict[str, Any]]:
    """Return ``d2t``, the offset from a draft id to the target's, and the mask ``t2d``, if the head has its own
    vocabulary."""
    size = case.config.get("draft_vocab_size", VOCABULARY)
    if size == VOCABULARY:
        return {}
    chosen = np.sort(np.argsort(uniform(seed, "d2t", (VOCABULARY,)))[:size])
    offsets, mask = chosen - np.arange(size), np.isin(np.arange(VOCABULARY), chosen)
    return {
        "d2t": {"dtype": "int64", "values": offsets.tolist()},
        "t2d": {"dtype": "bool", "values": mask.astype(int).tolist()},
    }


def ask(case: HeadCase, sources: Sources, seed: int) -> HeadGolden | None:
    """Return the original's outputs under ``seed``; None if rounding changes its tree: try another seed."""
    heads = {dtype: build(case, sources, dtype) for dtype in (torch.float64, torch.float32)}
    everything = heads[torch.float32].shapes()
    own = {name: shape for name, shape in everything.items() if name not in case.borrows}
    target = {case.borrows[name]: shape for name, shape in everything.items() if name in case.borrows}
    integers, copies = vocabulary_map(seed, case), _copies(case, own)
    tensors, borrowed = derive(seed, own, integers, copies), make_tensors(seed, target)
    given = inputs(seed, heads[torch.float32].width, 0 if case.method == "medusa" else CHAIN)
    loaded = tensors | {name: borrowed[lent] for name, lent in case.borrows.items()}
    (exact, tree), (rough, rough_tree) = (_answers(heads[dtype], dtype, case, loaded, given) for dtype in heads)
    if any(not np.array_equal(tree[key], rough_tree[key]) for key in tree):
        return None
    return HeadGolden(
        name=case.name,
        method=case.method,
        config=case.config,
        original=case.original,
        seed=seed,
        shapes=own,
        integers=integers,
        copies=copies,
        target_shapes=target,
        weights_sha256=digest(tensors | borrowed),
        **given,
        answers=exact,
        error={key: np.asarray(deviation(key, rough[key], exact[key])) for key in exact},
        tree=case.tree,
        tree_answers=tree,
        versions={"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__},
    )


def _copies(case: HeadCase, shapes: Shapes) -> dict[str, str]:
    """Return the case's copies; where blocks are shared, the later blocks are copies of the first."""
    if not case.shared_blocks:
        return case.copies
    parts = {name: name.split(".") for name in shapes if ".linear." in name}
    return {name: ".".join([part[0], "0", *part[2:]]) for name, part in parts.items() if part[1] != "0"}


def _answers(head: Head, dtype: torch.dtype, case: HeadCase, tensors: Arrays, given: Arrays) -> tuple[Arrays, Arrays]:
    head.load({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
    features, tokens = torch.from_numpy(given["features"]).to(dtype), torch.from_numpy(given["tokens"])
    with running(dtype):
        answers = head.answer(features, tokens, torch.from_numpy(given["chain_tokens"]))
        tree = head.tree(features, tokens) if case.tree else {}
    return {key: value.double().numpy() for key, value in answers.items()}, {k: v.numpy() for k, v in tree.items()}


def make(case: HeadCase, sources: Sources, seed: int) -> HeadGolden:
    """Return the first acceptable record at ``seed``, ``seed + 1``, ...

    Raises:
        RuntimeError: none of ``SEED_TRIES`` seeds is acceptable.
    """
    for candidate in range(seed, seed + SEED_TRIES):
        golden = ask(case, sources, candidate)
        if golden is not None:
            return golden
    raise RuntimeError(f"{case.name}: rounding changes the tree under each of {SEED_TRIES} seeds")


# --------------------------------------------------------------------------------------------------------------
# the command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    torch.set_num_threads(1)
    options = _parser().parse_args(arguments)
    return options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.oracle.heads", description=__doc__)
    commands = parser.add_subparsers(required=True)
    make_parser = commands.add_parser("make", help="write golden files")
    make_parser.add_argument("--out", type=pathlib.Path, required=True, help="folder; one sub-folder a case")
    make_parser.add_argument("--seed", type=int, default=1, help="first seed that is tried (1: the committed files)")
    make_parser.set_defaults(command=_make)
    check_parser = commands.add_parser("check", help="compute committed files again and compare")
    check_parser.add_argument("folder", type=pathlib.Path)
    check_parser.set_defaults(command=_check)
    for command in (make_parser, check_parser):
        command.add_argument("--case", action="append", default=[], help="name of a case; repeat it; all by default")
        for checkout in (name for name, (load, _) in _CHECKOUTS.items() if load is not None):
            command.add_argument(f"--{checkout}", type=pathlib.Path, help="checkout of its sources")
    commands.add_parser("list", help="names of the cases").set_defaults(command=_list)
    return parser


def _sources(options: argparse.Namespace) -> Sources:
    sources = {"transformers": types.SimpleNamespace()}
    for name, (load, _) in _CHECKOUTS.items():
        if load is not None and (checkout := getattr(options, name)) is not None:
            sources[name] = load(checkout)
    return sources


def _pick(options: argparse.Namespace, sources: Sources) -> list[HeadCase]:
    unknown = set(options.case) - {case.name for case in HEADS}
    if unknown:
        raise SystemExit(f"unknown case {', '.join(sorted(unknown))}; `list` prints the known ones")
    cases = [case for case in HEADS if not options.case or case.name in options.case]
    possible = [case for case in cases if case.checkout in sources]
    if left := [case.name for case in cases if case not in possible]:
        print(f"without a checkout of their original: {', '.join(left)}", file=sys.stderr)
    return possible


def _make(options: argparse.Namespace) -> int:
    sources = _sources(options)
    for case in _pick(options, sources):
        golden = make(case, sources, options.seed)
        golden.save(options.out)
        errors = ", ".join(f"{key} {value.max():.1e}" for key, value in golden.error.items())
        largest = ", ".join(f"{key} {np.abs(value).max():.1f}" for key, value in golden.answers.items())
        print(f"{golden.name:32} seed {golden.seed:<4} float32 error: {errors}; largest: {largest}", flush=True)
    if "medusa" in sources and not options.case:
        np.savez_compressed(options.out / TYPICAL, **cast(Any, typical.answers(sources["medusa"])))
    return 0


def _check(options: argparse.Namespace) -> int:
    sources = _sources(options)
    cases, stored = _pick(options, sources), names(options.folder)
    wrong = [f"{name}: not the same set of cases" for name in {case.name for case in HEADS} ^ set(stored)]
    for case in cases:
        if case.name in stored:
            wrong += _differences(case, sources, read_head(options.folder / case.name))
    if "medusa" in sources:
        wrong += _typical_differences(typical.answers(sources["medusa"]), options.folder / TYPICAL)
    print("\n".join(wrong) or f"{len(cases)} of {len(HEADS)} cases reproduced")
    return 1 if wrong else 0


def _differences(case: HeadCase, sources: Sources, stored: HeadGolden) -> list[str]:
    fresh = ask(case, sources, stored.seed)
    if fresh is None:
        return [f"{case.name}: seed {stored.seed} is not acceptable any more"]
    same = ("method", "config", "original", "shapes", "integers", "copies", "target_shapes", "weights_sha256", "tree")
    wrong = [f"{case.name}: {key} differs" for key in same if getattr(fresh, key) != getattr(stored, key)]
    arrays = {key: (getattr(fresh, key), getattr(stored, key)) for key in ("features", "tokens", "chain_tokens")}
    arrays |= {key: (value, stored.tree_answers[key]) for key, value in fresh.tree_answers.items()}
    wrong += [f"{case.name}: {key} differs" for key, pair in arrays.items() if not np.array_equal(*pair)]
    for key, value in fresh.answers.items():
        off = float(np.abs(value - stored.answers[key]).max())
        wrong += [f"{case.name}: {key} is off by {off:.1e}"] if off > REPRODUCED else []
    return wrong


def _typical_differences(fresh: Arrays, file: pathlib.Path) -> list[str]:
    with np.load(file, allow_pickle=False) as stored:
        if stored.keys() != fresh.keys():
            return [f"{file.name}: not the same arrays"]
        return [f"{file.name}: {key} differs" for key in fresh if not np.array_equal(fresh[key], stored[key])]


def _list(options: argparse.Namespace) -> int:
    print("\n".join(case.name for case in HEADS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
