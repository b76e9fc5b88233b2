"""Compilation, at the start, of what quantises new weights: an update of a quantised model then compiles nothing."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.execution.placement import placed_params
from jaxinfer.engine.execution.prepare import prepared_weights
from jaxinfer.models.model import Model
from jaxinfer.quant import Quantized, is_stored
from jaxinfer.types import walk_specs
from jaxinfer.weights.errors import WeightsError
from jaxinfer.weights.fit import fitted, is_spec


def compile_quantisers(model: Model, engine: ResolvedEngine, platform: str, mesh: Mesh) -> None:
    """Quantise and place zeros, once in each form of the quantised weights of a model and of its draft model."""
    for each in (model, model.draft):
        if each is not None:
            _compile(each, engine, platform, mesh)


def _compile(model: Model, engine: ResolvedEngine, platform: str, mesh: Mesh) -> None:
    declared, dtype = dict(walk_specs(model.declared_specs)), str(model.dtype)
    for path, spec in _forms(model).items():
        try:
            zeros = np.zeros(declared[path].shape, model.dtype)
            make = fitted(path, spec, zeros, declared=declared, dtype=dtype, cast=False, copy=False)
        except (KeyError, WeightsError):
            continue  # an update is rejected, too
        specs, params = spec, make()
        for name in reversed(path):
            specs, params = {name: specs}, {name: params}
        part = prepared_weights(model.replace(specs=specs, params=params, draft=None), engine, platform, mesh)
        jax.block_until_ready(placed_params(part.specs, part.params, mesh))


def _forms(model: Model) -> dict[tuple[str, ...], Quantized]:
    """Return one quantised weight, by path, for each layout and shape."""
    found: dict[Any, tuple[tuple[str, ...], Quantized]] = {}
    for keys, node in jax.tree_util.tree_leaves_with_path(model.specs, is_leaf=is_stored):
        if isinstance(node, Quantized):
            leaves, form = jax.tree.flatten(node, is_leaf=is_spec)
            kind = form, tuple((leaf.shape, leaf.axes, leaf.dtype) for leaf in leaves)
            found.setdefault(kind, (tuple(key.key for key in keys), node))
    return dict(found.values())
