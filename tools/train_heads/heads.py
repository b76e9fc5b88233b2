"""Heads to train: structure, initial weights, and writing them as a folder."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxinfer.layers.norm import RMSNorm
from jaxinfer.models.head import HeadFiles
from jaxinfer.models.heads.eagle import MAP
from jaxinfer.models.model import Model
from jaxinfer.models.registry import HEADS
from jaxinfer.types import ParamSpec
from jaxinfer.weights import save_params
from jaxinfer.weights.safetensors.reader import SafetensorsFile
from jaxinfer.weights.safetensors.writer import write_tensors
from tools.train_heads.recipes import HeadRecipe, config_json

NAMES = {"medusa": "0.0.linear.weight", "eagle3": "midlayer.fc"}  # tensors that identify the layout
FILES = {"medusa": "medusa_lm_head.safetensors", "eagle3": "model.safetensors"}

Tree = Any


def most_frequent(rows: Int[np.ndarray, "..."], vocab: int, count: int) -> Int[np.ndarray, " count"]:
    """Return the most frequent tokens, ascending."""
    counts = np.bincount(rows.reshape(-1), minlength=vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:count])


def build(recipe: HeadRecipe, target: Model, tokens: Int[np.ndarray, " draft_vocab"], seed: int) -> Model:
    """Build an untrained float32 head; EAGLE-3 drafts only ``tokens``. It starts with the target's table, and norm.

    Args:
        recipe: fitted to the target.

    Raises:
        ConfigError: the target has too few layers for EAGLE-3.
    """
    known = config_json(recipe, target.config, target.name)
    files = HeadFiles(known, {NAMES[recipe.method]}, target.config, target.cache_spec.windows)
    family = HEADS[recipe.method].family(files)
    config = family.config(known)
    head = Model(family.module(config), {}, config, family, recipe.method)
    table: Any = target.params[files.head]["table"]
    table = table if isinstance(table, jax.Array) else table.dequantize()
    said = table[tokens] if recipe.method == "eagle3" else table[: config.vocab_size]
    head = head.replace(params=_first_params(head.specs, said, seed))
    module: Any = target.module
    if recipe.method == "eagle3" and type(module.final_norm()) is RMSNorm:
        head = head.replace(params={**head.params, "final_norm": target.params["final_norm"]})
    if recipe.method == "eagle3" and len(tokens) < config.vocab_size:
        head = head.replace(
            specs={**head.specs, MAP: ParamSpec((config.vocab_size,), (None,), dtype="int32")},
            params={**head.params, MAP: jnp.asarray(_inverse(tokens, config.vocab_size))},
        )
    return head


def _inverse(tokens: Int[np.ndarray, " draft_vocab"], vocab: int) -> Int[np.ndarray, " vocab"]:
    """Return the head's id of each of the model's tokens, -1 where it has none."""
    inverse = np.full(vocab, -1, np.int32)
    inverse[tokens] = np.arange(len(tokens))
    return inverse


def _first_params(specs: Tree, table: jax.Array, seed: int) -> Tree:
    """Draw normal weights of variance 1 / fan-in; Medusa's residual layers add zero at first."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(specs)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def one(path: tuple[Any, ...], spec: ParamSpec, key: jax.Array) -> jax.Array:
        name = path[-1].key
        if name == "table":
            return table.astype(jnp.float32)
        if spec.init == "ones":
            return jnp.ones(spec.shape)
        if spec.init == "zeros" or name == "weight":
            return jnp.zeros(spec.shape)
        scale = 0.5 if name in ("out", "down") else 1.0  # projections into the residual stream
        return scale * spec.shape[spec.inputs or 0] ** -0.5 * jax.random.normal(key, spec.shape)

    made = [one(path, spec, key) for (path, spec), key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, made)


def write(folder: pathlib.Path, recipe: HeadRecipe, head: Model, params: Tree, target: Model) -> None:
    """Write a folder in the layout of the method's authors, weights rounded to bfloat16."""
    specs = {name: spec for name, spec in head.specs.items() if name != MAP}
    save_params(folder, params, specs, config_json(recipe, target.config, target.name), "bfloat16")
    saved = folder / "model.safetensors"
    if recipe.method == "eagle3":
        stored = SafetensorsFile(saved)
        write_tensors(saved, {name: stored.read(name) for name in stored.tensors} | _vocabulary(head))
    os.replace(saved, folder / FILES[recipe.method])


def _vocabulary(head: Model) -> dict[str, np.ndarray]:
    """Return ``d2t``, the offset from the head's ids to the model's, and ``t2d``, the mask of its tokens."""
    known = np.asarray(head.params.get(MAP, np.arange(head.config.vocab_size))) >= 0
    tokens = np.flatnonzero(known)
    return {"d2t": tokens - np.arange(len(tokens)), "t2d": known}
