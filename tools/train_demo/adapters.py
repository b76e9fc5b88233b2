"""Train or measure the LoRA adapters that ship with the demo model: ``python -m tools.train_demo.adapters``.

Each is trained on one author (`styles.py`), in PEFT's format: see `docs/demo_model.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from jaxinfer.loading import load_model
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.merge import declared
from jaxinfer.lora.peft.read import read_adapter
from jaxinfer.lora.peft.write import save_adapter
from jaxinfer.lora.trainable import init_adapter
from jaxinfer.models.model import Model
from jaxinfer.opening import model_folder
from tools.train_demo import corpus
from tools.train_demo.evaluate import Scorer
from tools.train_demo.styles import STYLES, Style

REPO = pathlib.Path(__file__).resolve().parents[2]
BASE = "demo"
MEASURED = 256  # tokens of a window in the reported losses


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Training schedule of an adapter: the rate rises over ``warmup`` steps, then falls linearly to zero."""

    steps: int
    rank: int = 8
    rows: int = 4
    length: int = 128
    learning_rate: float = 4e-3
    warmup: int = 20
    say_every: int = 40


QUICK = Schedule(steps=3, rank=2, rows=2, length=32, warmup=1, say_every=2)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_demo.adapters", description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, default=REPO.parent / "shared" / "data", help="the data folder")
    parser.add_argument("--out", type=pathlib.Path, default=REPO / "jaxinfer" / "demo" / "adapters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(STYLES), help="one of them")
    parser.add_argument("--quick", action="store_true", help="a few steps: does the tool work?")
    parser.add_argument("--evaluate", action="store_true", help="train nothing, measure what --out holds")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    styles = {name: style for name, style in STYLES.items() if args.only in (None, name)}
    try:
        splits = {name: corpus.Split.of(style.read(args.data)) for name, style in styles.items()}
    except (FileNotFoundError, ValueError) as error:
        print(f"--data {args.data}: {_missing(error, styles)}", file=sys.stderr)
        return 2
    model = load_model(BASE, "float32", show_progress=False)
    for name, split in splits.items():
        plan = QUICK if args.quick else Schedule(steps=styles[name].steps)
        if not args.evaluate:
            adapter = train(model, split, plan, args.seed, functools.partial(print, name, flush=True))
            save_adapter(args.out / name, adapter, declared(model), dtype="bfloat16")
        print(json.dumps({name: measure(model, split, args.out / name)}, indent=2), flush=True)
    return 0


def _missing(error: Exception, styles: dict[str, Style]) -> str:
    if not isinstance(error, FileNotFoundError):
        return str(error)
    books = "; ".join(f"text/gutenberg/{style.ebook}.txt ({style.title})" for style in styles.values())
    return f"{error.filename} is missing; it must have Project Gutenberg's {books}"


def train(model: Model, split: corpus.Split, plan: Schedule, seed: int, say: Callable[[str], None]) -> Adapter:
    """Train an adapter on the training split of a text; return it after all steps."""
    tokenizer = _tokenizer()
    data = corpus.Corpus(corpus.encode(tokenizer, split.train), [], tokenizer, corpus.begin(tokenizer))
    update = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(_rate(plan), b2=0.99))
    adapter = init_adapter(model, plan.rank, jax.random.key(seed))
    state, advance, began = update.init(adapter), _step_function(model, update), time.monotonic()
    losses: list[jax.Array] = []
    for step in range(plan.steps):
        windows = corpus.batch(data, seed, step, plan.rows, plan.length)
        adapter, state, value = advance(adapter, state, windows)
        losses.append(value)
        if (step + 1) % plan.say_every == 0:
            seconds = time.monotonic() - began
            say(f"step {step + 1}/{plan.steps}: training {np.mean(losses):.4f} nats/token, {seconds:.0f} s")
            losses.clear()
    return adapter


def _rate(plan: Schedule) -> optax.Schedule:
    rise = optax.linear_schedule(0.0, plan.learning_rate, plan.warmup)
    fall = optax.linear_schedule(plan.learning_rate, 0.0, plan.steps - plan.warmup)
    return optax.join_schedules([rise, fall], [plan.warmup])


def loss(adapter: Adapter, model: Model, windows: Int[Array, "rows window"]) -> Float[Array, ""]:
    """Return the mean nats per token of a model with an adapter."""
    logits = model.with_lora(adapter)(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def _step_function(model: Model, update: optax.GradientTransformation) -> Callable[..., tuple[Adapter, Any, jax.Array]]:
    @jax.jit
    def step(adapter: Adapter, state: Any, windows: jax.Array) -> tuple[Adapter, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(adapter, model, windows)
        changes, state = update.update(gradients, state, adapter)
        return optax.apply_updates(adapter, changes), state, value

    return step


def measure(model: Model, split: corpus.Split, folder: pathlib.Path) -> dict[str, Any]:
    """Return losses of the base and of the stored adapter on the two held-out splits."""
    adapter = read_adapter(folder, declared(model), max_rank=64)
    tokenizer, length = _tokenizer(), MEASURED
    result: dict[str, Any] = {"bytes": sum(file.stat().st_size for file in folder.iterdir()), "rank": adapter.rank}
    for part in ("validation", "test"):
        ids = corpus.encode(tokenizer, getattr(split, part))
        losses = {
            name: Scorer(one, tokenizer.token_to_id(corpus.BOS) or 0).mean(one.params, ids, length)
            for name, one in (("base", model), ("adapter", model.with_lora(adapter)))
        }
        result[part] = {"tokens": len(ids), "nats_per_token": losses}
    return result


def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_folder(BASE) / "tokenizer.json"))


if __name__ == "__main__":
    sys.exit(main())
