"""Training with the project's own Llama, a dropout block through its `overrides`, and optax."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxinfer.layers.attention import causal_attend
from jaxinfer.models.families.llama import Llama, LlamaBlock
from jaxinfer.models.model import Model, abstract
from jaxinfer.quant import take
from jaxinfer.types import ParamSpec
from tools.train_demo.attention import blocked_attend
from tools.train_demo.corpus import Corpus, batch
from tools.train_demo.recipes import Recipe

Tree = Any

SHORT = 256  # tokens up to which unblocked attention is used


def build(recipe: Recipe, seed: int) -> Model:
    """Build an untrained model of the recipe's shape, float32."""
    model = abstract(recipe.config_json(), "float32", recipe.name)
    return model.replace(params=initial_params(model.specs, seed, recipe.layers))


def initial_params(specs: Tree, seed: int, layers: int) -> Tree:
    """Draw normal weights of variance 1 / fan-in; residual output projections are smaller (Radford et al. 2019)."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(specs)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    residual = (2 * layers) ** -0.5

    def one(path: tuple[Any, ...], spec: ParamSpec, key: jax.Array) -> jax.Array:
        name = path[-1].key
        if spec.init in ("ones", "zeros"):
            return jnp.full(spec.shape, float(spec.init == "ones"))
        fan_in = spec.shape[-1 if name == "patch" else spec.inputs or 0]
        scale = 0.04 if name == "table" else fan_in**-0.5 * (residual if name in ("out", "down") else 1.0)
        return scale * jax.random.normal(key, spec.shape)

    made = [one(path, spec, key) for (path, spec), key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, made)


def dropped(x: Float[Array, "..."], key: jax.Array, rate: float) -> Float[Array, "..."]:
    """Apply dropout with 8-bit random numbers: ``rate`` is rounded to 1/256."""
    threshold = round(rate * 256)
    keep = jax.random.bits(key, x.shape, jnp.uint8) >= threshold
    return jnp.where(keep, x * (256 / (256 - threshold)), 0.0)


def dropout_block(rate: float) -> type[LlamaBlock]:
    """Make a block class with dropout on both residual branches. The layer's random key is passed as its cache."""

    class DropoutBlock(LlamaBlock):
        def __call__(self, x: Any, rope: Any, attend: Any, cache: Any) -> tuple[Any, Any]:
            first, second = jax.random.split(cache)
            mixed, _ = self.attention(self.attention_norm(x), rope, attend, None)
            x = x + dropped(mixed, first, rate)
            return x + dropped(self.feed_forward(self.mlp_norm(x)), second, rate), cache

    return DropoutBlock


def training_loss(module: Llama, rate: float) -> Callable[[Tree, jax.Array, jax.Array], jax.Array]:
    """Make a function of mean nats per token of windows [rows, length + 1], with dropout on all blocks."""
    layers = range(len(module.config.layers))
    noisy = module.clone(overrides=tuple((index, dropout_block(rate)) for index in layers)) if rate else module

    def loss(params: Tree, windows: Int[Array, "rows window"], key: jax.Array) -> jax.Array:
        tokens, targets = windows[:, :-1], windows[:, 1:]
        x = take(params["embed"]["table"], tokens)
        keys = list(jax.random.split(key, len(layers) + 1))
        x = dropped(x, keys.pop(), rate) if rate else x
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        bound = {"params": params}
        attend = causal_attend if tokens.shape[1] <= SHORT else blocked_attend
        hidden, _ = noisy.apply(bound, x, positions, attend, keys if rate else None, method="forward")
        logits = noisy.apply(bound, hidden, method="head")
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return loss


def schedule(recipe: Recipe) -> optax.Schedule:
    peak = recipe.learning_rate
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, recipe.warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, recipe.decay),
        ],
        [recipe.warmup, recipe.steps - recipe.decay],
    )


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Make AdamW with clipped gradients; norms do not decay."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule(recipe),
            b2=0.99,
            weight_decay=recipe.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


@dataclasses.dataclass
class Progress:
    """State that a resumed run needs: step, parameters, the optimizer's state and the best parameters so far."""

    step: int
    params: Tree
    opt_state: Tree
    best: Tree
    best_loss: float
    seconds: float

    def note(self, held_out: float, stage_ends: bool) -> None:
        """Keep the parameters if they are the best so far."""
        if held_out < self.best_loss:
            self.best, self.best_loss = self.params, held_out
        if stage_ends:
            self.best_loss = np.inf

    def save(self, file: pathlib.Path) -> None:
        arrays = jax.tree.leaves((self.params, self.opt_state, self.best))
        head = np.array([self.step, self.best_loss, self.seconds])
        partial = file.with_suffix(".partial.npz")
        np.savez(partial, head, *arrays)
        partial.replace(file)

    def load(self, file: pathlib.Path) -> Progress:
        """Load the progress stored in ``file``, in the structure of this one."""
        with np.load(file, allow_pickle=False) as stored:
            head, *arrays = [stored[name] for name in stored.files]
        structure = jax.tree.structure((self.params, self.opt_state, self.best))
        params, opt_state, best = jax.tree.unflatten(structure, [jnp.asarray(array) for array in arrays])
        return Progress(int(head[0]), params, opt_state, best, float(head[1]), float(head[2]))


def train(
    model: Model,
    recipe: Recipe,
    data: Corpus,
    seed: int,
    validate: Callable[[Tree, int], float],
    file: pathlib.Path,
    say: Callable[[str], None],
) -> Progress:
    """Train ``model`` by ``recipe``, or resume from ``file``. ``validate(params, length)`` is the loss to select by.

    A longer window restarts the selection: losses over windows of different lengths do not compare.
    """
    update = optimizer(recipe)
    progress = Progress(0, model.params, update.init(model.params), model.params, np.inf, 0.0)
    if file.exists():
        progress = progress.load(file)
        say(f"{recipe.name}: goes on from step {progress.step}")
    assert isinstance(model.module, Llama)
    advance = _step_function(training_loss(model.module, recipe.dropout), update)
    noise = jax.random.key(seed, impl="rbg")
    losses: list[jax.Array] = []
    began = time.monotonic() - progress.seconds
    while progress.step < recipe.steps:
        stage = recipe.stage_at(progress.step)
        windows = batch(data, seed, progress.step, stage.rows, stage.length)
        key = jax.random.fold_in(noise, progress.step)
        progress.params, progress.opt_state, loss = advance(progress.params, progress.opt_state, windows, key)
        losses.append(loss)
        progress.step += 1
        if progress.step % recipe.eval_every and not recipe.ends_stage(progress.step):
            continue
        held_out = validate(progress.params, stage.length)
        progress.seconds = time.monotonic() - began
        say(_line(recipe, progress, stage.length, float(np.mean(losses)), held_out))
        losses.clear()
        progress.note(held_out, recipe.ends_stage(progress.step) and progress.step < recipe.steps)
        progress.save(file)
    return progress


def _line(recipe: Recipe, progress: Progress, length: int, training: float, held_out: float) -> str:
    return (
        f"{recipe.name} step {progress.step}/{recipe.steps} window {length}: training {training:.4f},"
        f" held-out {held_out:.4f} nats/token, {progress.seconds:.0f} s"
    )


def _step_function(
    loss: Callable[[Tree, jax.Array, jax.Array], jax.Array], update: optax.GradientTransformation
) -> Callable[..., tuple[Tree, Tree, jax.Array]]:
    @jax.jit
    def step(params: Tree, opt_state: Tree, windows: jax.Array, key: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, windows, key)
        changes, opt_state = update.update(gradients, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, value

    return step
