"""Train the demo models, or measure them: see `docs/demo_model.md`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import jax
from tokenizers import Tokenizer

from jaxinfer.models.model import Model
from tools.train_demo import corpus, folder
from tools.train_demo.evaluate import Scorer
from tools.train_demo.ngram import MAX_ORDER, NGram
from tools.train_demo.recipes import RECIPES, Recipe, quick
from tools.train_demo.training import build, train
from tools.train_demo.vision import QUICK, VisionRecipe, train_vision

REPO = pathlib.Path(__file__).resolve().parents[2]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_demo", description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, default=REPO.parent / "shared" / "data", help="the data folder")
    parser.add_argument(
        "--out", type=pathlib.Path, default=REPO / "jaxinfer" / "demo", help="gets target/, draft/, vision/"
    )
    parser.add_argument(
        "--work-dir",
        type=pathlib.Path,
        default=pathlib.Path.home() / ".cache" / "jaxinfer" / "train_demo",
        help="checkpoints, from which an interrupted run goes on",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(RECIPES), help="one of the two models")
    parser.add_argument("--quick", action="store_true", help="a few steps of tiny models: does the tool work?")
    parser.add_argument("--vision", action="store_true", help="train demo-vision, which needs no data (docs/images.md)")
    parser.add_argument("--evaluate", action="store_true", help="train nothing, measure what --out holds")
    parser.add_argument("--ngram-baseline", action="store_true", help="train nothing, measure n-gram models")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.vision:
        train_vision(QUICK if args.quick else VisionRecipe(), args.out / "vision", args.seed, _say)
        return 0
    try:
        split = corpus.Split.of(corpus.read_text(args.data))
    except FileNotFoundError as error:
        print(f"--data {args.data}: {error.filename} is missing", file=sys.stderr)
        return 2
    if args.ngram_baseline:
        _say(json.dumps(ngram_baseline(split), indent=2))
        return 0
    recipes = [recipe for name, recipe in RECIPES.items() if args.only in (None, name)]
    for recipe in map(quick, recipes) if args.quick else recipes:
        if not args.evaluate:
            train_one(recipe, split, args)
        _say(json.dumps({recipe.name: measure(recipe, split, args.out / recipe.name)}, indent=2))
    return 0


def train_one(recipe: Recipe, split: corpus.Split, args: argparse.Namespace) -> None:
    """Train (or resume), and write the best parameters to ``--out``."""
    _say(f"{recipe.name}: {recipe.steps} steps on {jax.devices()[0].device_kind}, seed {args.seed}")
    tokenizer = corpus.train_tokenizer(split.train, recipe.vocab)
    data, held_out = corpus.corpus(tokenizer, split.train), corpus.encode(tokenizer, split.validation)
    model = build(recipe, args.seed)
    scorer = _scorer(model, tokenizer)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    file = args.work_dir / checkpoint_name(recipe, args.seed)
    progress = train(
        model, recipe, data, args.seed, lambda params, length: scorer.mean(params, held_out, length), file, _say
    )
    folder.write(args.out / recipe.name, recipe, model, progress.best, tokenizer)


def checkpoint_name(recipe: Recipe, seed: int) -> str:
    """Return a file name that is unique to recipe and seed, so that no run resumes from a different configuration."""
    return f"{recipe.name}-{zlib.crc32(repr((recipe, seed)).encode()):08x}.npz"


def measure(recipe: Recipe, split: corpus.Split, where: pathlib.Path) -> dict[str, Any]:
    """Return losses of the stored weights on both held-out splits, in windows of the whole context."""
    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    model = build(recipe, 0)
    params = folder.stored_params(where, model)
    scorer = _scorer(model, tokenizer)
    length = recipe.stages[-1].length
    result: dict[str, Any] = {"parameters": sum(leaf.size for leaf in jax.tree.leaves(params))}
    for name, text in (("validation", split.validation), ("test", split.test)):
        ids = corpus.encode(tokenizer, text)
        result[name] = dataclasses.asdict(scorer.held_out(params, ids, len(text), length))
    return result


def _scorer(model: Model, tokenizer: Tokenizer) -> Scorer:
    bos = tokenizer.token_to_id(corpus.BOS)
    assert bos is not None  # one of `corpus.SPECIALS`
    return Scorer(model, bos)


def ngram_baseline(split: corpus.Split) -> dict[str, Any]:
    """Return bits per character by order, and the order that is best on the validation split."""
    scores = {}
    for order in range(2, MAX_ORDER + 1):
        model = NGram.train(split.train, order)
        scores[order] = [model.bits_per_character(text) for text in (split.validation, split.test)]
    best = min(scores, key=lambda order: scores[order][0])
    table = {str(order): {"validation": both[0], "test": both[1]} for order, both in scores.items()}
    return {"bits_per_character": table, "best_order": best}


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
