"""Train draft heads for any dense model that jaxinfer serves, or measure them: see `docs/demo_model.md`."""

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
import numpy as np

from jaxinfer.config.aliases import DEMO_FOLDERS
from jaxinfer.loading import load_model
from jaxinfer.opening import model_folder
from tools.train_demo import corpus
from tools.train_heads import heads
from tools.train_heads.evaluate import SPEAKERS, TEMPERATURES, acceptance, engine
from tools.train_heads.generated import generated, identity, prompts
from tools.train_heads.recipes import RECIPES, HeadRecipe, quick
from tools.train_heads.texts import corpus_of
from tools.train_heads.training import Texts, train

REPO = pathlib.Path(__file__).resolve().parents[2]
PROMPTS, PROMPT_TOKENS = 24, 96  # held-out prompts to measure, and the length of the longest


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_heads", description=__doc__)
    parser.add_argument("--method", choices=sorted(RECIPES), help="one kind of heads (default: all)")
    parser.add_argument("--target", default="demo", help="the model that they draft for (default demo)")
    parser.add_argument("--out", type=pathlib.Path, default=REPO / "jaxinfer" / "demo", help="gets medusa/ and eagle3/")
    parser.add_argument("--data", type=pathlib.Path, default=REPO.parent / "shared" / "data", help="the data folder")
    parser.add_argument(
        "--text", type=pathlib.Path, help="a text like what the model is to write (default: that of --data)"
    )
    parser.add_argument(
        "--work-dir",
        type=pathlib.Path,
        default=pathlib.Path.home() / ".cache" / "jaxinfer" / "train_heads",
        help="what the model wrote, and checkpoints, from which an interrupted run goes on",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="in place of the recipe's")
    sizes = "size of EAGLE-3 heads (default: the recipe's for the demo model, else {})"
    parser.add_argument("--intermediate", type=int, help=sizes.format("the target's"))
    parser.add_argument("--draft-vocab", type=int, help=sizes.format("32000"))
    parser.add_argument("--quick", action="store_true", help="a few steps of tiny heads: does the tool work?")
    parser.add_argument("--evaluate", action="store_true", help="train nothing, measure what --out holds")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        split = corpus.Split.of(args.text.read_text(encoding="utf-8") if args.text else corpus.read_text(args.data))
    except FileNotFoundError as error:
        given = f"--text {args.text}" if args.text else f"--data {args.data}: {error.filename}"
        print(f"{given} is missing", file=sys.stderr)
        return 2
    for method in RECIPES if args.method is None else [args.method]:
        if args.evaluate:
            _say(json.dumps({method: measure(method, split, args)}, indent=2))
        else:
            train_one(recipe_of(method, args), split, args)
    return 0


def recipe_of(method: str, args: argparse.Namespace) -> HeadRecipe:
    recipe = RECIPES[method]
    sizes = (recipe.intermediate, recipe.draft_vocab) if args.target == "demo" else (0, 0)
    recipe = dataclasses.replace(
        recipe, intermediate=args.intermediate or sizes[0], draft_vocab=args.draft_vocab or sizes[1]
    )
    recipe = quick(recipe) if args.quick else recipe
    if args.steps is None:
        return recipe
    return dataclasses.replace(recipe, steps=args.steps, decay=min(recipe.decay, args.steps // 2))


def train_one(recipe: HeadRecipe, split: corpus.Split, args: argparse.Namespace) -> None:
    """Train (or resume), and write the best parameters to ``--out``."""
    target = load_model(args.target, "float32", show_progress=False)
    recipe = recipe.fitted(target.config)
    learnt = corpus_of(target, model_folder(args.target), split.train)
    rows = generated(target, learnt, recipe.text, args.seed, args.work_dir, _say)
    texts = Texts.of(rows, recipe.text.held_out, learnt)
    vocab = target.config.vocab_size
    tokens = heads.most_frequent(texts.written, vocab, recipe.draft_vocab)
    head = heads.build(recipe, target, tokens, args.seed)
    _say(f"{recipe.method}: {recipe.steps} steps on {jax.devices()[0].device_kind}, seed {args.seed}")
    if recipe.method == "eagle3":
        share = np.isin(texts.written, tokens).mean()
        _say(f"{recipe.method}: {len(tokens)} of {vocab} tokens are {share:.1%} of what the target writes")
    file = args.work_dir / checkpoint_name(recipe, args.seed, identity(target))
    progress = train(head, target, recipe, texts, args.seed, file, _say)
    heads.write(args.out / folder_name(recipe.method), recipe, head, progress.best, target)


def checkpoint_name(recipe: HeadRecipe, seed: int, target: str) -> str:
    """Return a file name unique to recipe, seed and target, so that no run resumes from a different configuration."""
    return f"{recipe.method}-{zlib.crc32(repr((recipe, seed, target)).encode()):08x}.npz"


def folder_name(method: str) -> str:
    """Return the folder of a head of the demo model."""
    return DEMO_FOLDERS[f"demo-{method}"]


def measure(method: str, split: corpus.Split, args: argparse.Namespace) -> dict[str, Any]:
    """Measure acceptance of the stored head on prompts of the validation split, and of a model that knows speeches on
    those of the benchmark."""
    with engine(args.target, method, str(args.out / folder_name(method)), 256) as llm:
        unseen = corpus_of(llm.model, model_folder(args.target), split.validation)
        kinds = {"held out": prompts(unseen, args.seed, PROMPTS, PROMPT_TOKENS)}
        if unseen.speeches:
            kinds["benchmark"] = [unseen.tokenizer.encode(f"{name}:").ids for name in SPEAKERS]
        return {
            kind: {str(heat): dataclasses.asdict(acceptance(llm, starts, heat)) for heat in TEMPERATURES}
            for kind, starts in kinds.items()
        }


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
