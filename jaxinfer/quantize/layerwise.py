"""Quantisation of a model's weights layer by layer: what a folder is written from, and what is quantised on load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfer.models.decoder import Decoder, PostNormBlock
from jaxinfer.quant.activation_hooks import InputStatistics
from jaxinfer.quant.make import Made, MadeCodebook
from jaxinfer.quant.make.gptq import enough_tokens
from jaxinfer.quant.make.recipe import RecipeError
from jaxinfer.quantize.calibration import Batch, entered, observed
from jaxinfer.quantize.fold import Folder, Statistics
from jaxinfer.quantize.layer import LayerWeights, Linear
from jaxinfer.quantize.structure import observable, structure_of
from jaxinfer.quantize.work import Work


def require_layers(work: Work) -> None:
    """Raise RecipeError for a model whose layers the recipe does not apply to one by one."""
    recipe, module = work.recipe, work.module
    if not isinstance(module, Decoder):
        raise RecipeError(f"{type(module).__name__} has no layers that can be run one by one")
    if recipe.method == "smoothquant" and isinstance(work.block(0), PostNormBlock):
        raise RecipeError("smoothquant scales the outputs of norms, and no norm is before the weights of this model")


def first_batches(work: Work) -> list[Batch]:
    """Return what the first layer reads for the samples."""
    assert work.calibration is not None
    names = [name for name in work.module.embeddings if name in work.model.params]
    params = jax.tree.map(jnp.asarray, _arrays({name: work.model.params[name] for name in names}))
    return entered(work.module, params, work.calibration, work.dtype)


def _arrays(tree: Any) -> Any:
    return {key: _arrays(tree[key]) for key in tree} if isinstance(tree, Mapping) else np.asarray(tree)


def quantized(work: Work, layer: LayerWeights, batches: Sequence[Batch] | None) -> dict[str, Made | MadeCodebook]:
    """Quantise the weights of a layer that the recipe applies to; return them by tensor name.

    Args:
        layer: with ``batches`` it is left with the dequantized values, and with the scales that are folded into it.
        batches: what the layer reads for the samples; None: the recipe is not calibrated.
    """
    statistics = Statistics()
    if batches is not None:
        paths = tuple(path for path, spec in layer.specs.items() if observable(path, spec))
        statistics = observed(work.module, layer, paths, batches, work.recipe.gram)
        if work.recipe.folded:
            structure = structure_of(work.module, layer, batches[0])
            Folder(layer, statistics, work.recipe, work.recipe.grid(work.dtype), structure).fold()
    return {
        name: quantized_weight(work, layer, linear, _gram(work, linear, statistics))
        for name, linear in work.taken(layer.index).items()
    }


def quantized_weight(
    work: Work, layer: LayerWeights, linear: Linear, gram: Float[Array, "k k"] | None = None
) -> Made | MadeCodebook:
    """Quantise one weight of a layer, see `quantized`."""
    weight = layer.weight(linear)
    made = work.recipe.made(jnp.asarray(weight), gram, work.dtype)
    if work.measures:
        values = np.asarray(made.dequantize())
        work.summary.kind(linear).add(weight, values)
        if work.calibration is not None:
            layer.replace(linear, values)
    return made


def _gram(work: Work, linear: Linear, statistics: Statistics) -> jax.Array | None:
    """Return the Gram matrix of a weight's inputs; None if not needed, or for an expert that saw too few tokens."""
    seen = statistics.get(linear.path)
    if seen is None or not work.recipe.gram:
        return None
    if linear.expert is not None:
        seen = InputStatistics(*(part[linear.expert] for part in seen))
    if not enough_tokens(float(seen.rows), linear.shape[1]):
        work.summary.kind(linear).starved += 1
        return None
    return jnp.asarray(seen.gram)
