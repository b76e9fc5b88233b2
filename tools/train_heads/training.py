"""Training of heads, on text that the target generated and some of its own training text."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from jaxinfer.models.heads.eagle import MAP
from jaxinfer.models.model import Model
from tools.train_demo.corpus import Corpus, batch
from tools.train_demo.training import Progress
from tools.train_heads.losses import loss, measure
from tools.train_heads.recipes import HeadRecipe

Tree = Any


@dataclasses.dataclass(frozen=True)
class Texts:
    """Training data of a head.

    Attributes:
        written: rows that the target generated.
        held_out: further generated rows, by temperature.
        learnt: the text that the target was trained on.
    """

    written: Int[np.ndarray, "rows length"]
    held_out: Mapping[float, Int[np.ndarray, "rows length"]]
    learnt: Corpus

    @staticmethod
    def of(rows: Mapping[float, Int[np.ndarray, "rows length"]], held_out: int, learnt: Corpus) -> Texts:
        written = np.concatenate([each[:-held_out] for each in rows.values()])
        return Texts(written, {temperature: each[-held_out:] for temperature, each in rows.items()}, learnt)

    def batch(self, recipe: HeadRecipe, seed: int, step: int) -> Int[np.ndarray, "rows length"]:
        """Return the rows of one step: a function of (seed, step) alone, so runs can resume."""
        known = round(recipe.rows * recipe.corpus_share)
        rng = np.random.default_rng([seed, step])
        parts = [self.written[rng.integers(len(self.written), size=recipe.rows - known)]]
        if known:
            parts.append(batch(self.learnt, seed, step, known, self.written.shape[1] - 1))
        rows = np.concatenate(parts)
        return rows if (step + 1) % recipe.join_every else _joined(rows, len(self.learnt.begin))


def _joined(rows: Int[np.ndarray, "rows length"], begin: int) -> Int[np.ndarray, "1 longer"]:
    """Join the rows into one sequence, which begins with the ``begin`` tokens (BOS) of the first row."""
    return np.concatenate([rows[0], *(row[begin:] for row in rows[1:])])[None]


def optimizer(recipe: HeadRecipe) -> optax.GradientTransformation:
    """Make AdamW with clipped gradients; the rate rises, stays and falls to zero; norms and biases do not decay."""
    peak = recipe.learning_rate
    rises, falls = optax.linear_schedule(0.0, peak, recipe.warmup), optax.linear_schedule(peak, 0.0, recipe.decay)
    border = max(recipe.warmup, recipe.steps - recipe.decay)
    rate = optax.join_schedules([rises, optax.constant_schedule(peak), falls], [recipe.warmup, border])
    decaying = optax.adamw(
        rate,
        b2=0.99,
        weight_decay=recipe.weight_decay,
        mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
    )
    return optax.chain(optax.clip_by_global_norm(1.0), decaying)


def train(
    head: Model,
    target: Model,
    recipe: HeadRecipe,
    texts: Texts,
    seed: int,
    file: pathlib.Path,
    say: Callable[[str], None],
) -> Progress:
    """Train ``head`` by ``recipe``, or resume from ``file``. The best parameters have the least held-out loss."""
    params = {name: value for name, value in head.params.items() if name != MAP}
    update = optimizer(recipe)
    progress = Progress(0, params, update.init(params), params, np.inf, 0.0)
    if file.exists():
        progress = progress.load(file)
        say(f"{recipe.method}: goes on from step {progress.step}")
    advance, began = _step_function(head, target, recipe, update), time.monotonic() - progress.seconds
    losses: list[jax.Array] = []
    while progress.step < recipe.steps:
        rows = texts.batch(recipe, seed, progress.step)
        progress.params, progress.opt_state, value = advance(progress.params, progress.opt_state, target.params, rows)
        losses.append(value)
        progress.step += 1
        if progress.step % recipe.eval_every and progress.step < recipe.steps:
            continue
        held_out = measures(head, progress.params, target, recipe, texts)
        progress.seconds = time.monotonic() - began
        say(_line(recipe, progress, float(np.mean(losses)), held_out))
        losses.clear()
        progress.note(_mean_loss(recipe, held_out), False)
        progress.save(file)
    return progress


def measures(
    head: Model, params: Tree, target: Model, recipe: HeadRecipe, texts: Texts
) -> dict[float, dict[str, list[float]]]:
    """Return, by temperature of the held-out text and by guess: cross-entropy, how often the likeliest tokens agree,
    and how probably draws agree."""
    found = {}
    for temperature, rows in texts.held_out.items():
        parts = [
            _measure(head, params, target, jnp.asarray(rows[at : at + recipe.rows]), recipe.guesses)
            for at in range(0, len(rows), recipe.rows)
        ]
        found[temperature] = dict(zip(("nats", "same", "overlap"), np.mean(parts, axis=0).tolist(), strict=True))
    return found


_measure = jax.jit(measure, static_argnames="count")


def _mean_loss(recipe: HeadRecipe, found: Mapping[float, Mapping[str, list[float]]]) -> float:
    weights = [recipe.discount**place for place in range(recipe.guesses)]
    return float(np.mean([np.average(each["nats"], weights=weights) for each in found.values()]))


def _line(
    recipe: HeadRecipe, progress: Progress, training: float, found: Mapping[float, Mapping[str, list[float]]]
) -> str:
    same = {str(temperature): [round(share, 3) for share in each["same"]] for temperature, each in found.items()}
    return (
        f"{recipe.method} step {progress.step}/{recipe.steps}: training {training:.4f}, held-out"
        f" {_mean_loss(recipe, found):.4f}, right {json.dumps(same)}, {progress.seconds:.0f} s"
    )


def _step_function(
    head: Model, target: Model, recipe: HeadRecipe, update: optax.GradientTransformation
) -> Callable[..., tuple[Tree, Tree, jax.Array]]:
    total = loss(head, target, recipe)

    @jax.jit
    def step(params: Tree, opt_state: Tree, known: Tree, tokens: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        value, gradients = jax.value_and_grad(total)(params, known, tokens)
        changes, opt_state = update.update(gradients, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, value

    return step
