"""Merging of adapters into a model's weights, and access to the weights for adapter readers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.module_paths import input_axis, with_tied_head
from jaxinfer.models.model import Model
from jaxinfer.parallel.heads import without_copies
from jaxinfer.quant import Quantized, Split, dense, is_stored
from jaxinfer.quant.banks import weight_path
from jaxinfer.quant.make.again import LayoutError, quantized_again
from jaxinfer.types import EMBEDDING, HEAD, ParamSpec, ParamTree, walk_specs

Path = tuple[str, ...]


Report = Callable[[Path, float], None]


def merge_lora(model: Model, adapter: Adapter, report: Report | None = None) -> Model:
    """Return the model with an adapter merged into its weights, without run-time cost.

    The sum is computed in float32 and rounded to the weight's dtype once, so in bfloat16 results differ slightly from
    those of an unmerged adapter. A quantised weight is dequantised, and the sum is rounded to nearest in its layout.

    Args:
        report: called for each weight that is quantised again, with its path and its relative error: the norm of what
            rounding changes over that of the sum.

    Raises:
        ValueError: the adapter does not fit this model, one of its weights is a tied embedding table or cannot be
            quantised again, or the adapter adds a bias that the model does not have.
    """
    if model.folded:
        raise ValueError(f"adapter: it does not fit {model.name}, whose inputs are scaled by its quantisation")
    specs = dict(walk_specs(declared(model)))
    params = dict(model.params)
    for path, delta in adapter.deltas.items():
        if path in (EMBEDDING, HEAD) and HEAD not in specs:
            raise ValueError(f"adapter: {'/'.join(path)} is tied: the table of embeddings and the head are one array")
        if path not in specs:
            raise ValueError(f"adapter: the model {model.name} has no parameter {'/'.join(path)}")
        _update(params, path, functools.partial(_merged, path, specs[path], delta, report))
        if delta.bias is not None:
            _update(params, bias_path(path), functools.partial(_with_bias, delta))
    return model.replace(params=params)


def declared(model: Model) -> ParamTree:
    """Return the specs as the model's family declares them, as `read_adapter` requires."""
    return model.family.param_specs(model.config)


def model_base(model: Model) -> Callable[[Path], np.ndarray]:
    """Return a function that gives `read_adapter` the model's own weights: float32, dequantized, each KV head once. It
    raises AdapterError for a weight that is sharded over several processes."""
    specs = with_tied_head(declared(model))

    def base(path: Path) -> np.ndarray:
        weight: Any = model.params
        for key in weight_path(model.params, path):
            weight = weight[key]
        _require_whole(path, weight)
        # a stored weight has its outputs first, independent of the parameter's order
        turned = is_stored(weight) and specs[path].inputs == 0
        values = np.asarray(dense(weight) if is_stored(weight) else weight, np.float32)
        return without_copies(np.moveaxis(values, -1, 0) if turned else values, specs[path])

    return base


def _require_whole(path: Path, weight: Any) -> None:
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(weight)):
        raise AdapterError(
            f"use_dora=true: the magnitudes are over norms of {'/'.join(path)}, which lies in several processes; merge "
            f"the adapter into the model, or train it without DoRA"
        )


def bias_path(path: Path) -> Path:
    """Return the path of a product's bias: next to its weight."""
    return (*path[:-1], "bias" if path[-1] == "table" else f"{path[-1]}_bias")


def _update(params: dict[str, Any], path: Path, change: Callable[[Any], Any]) -> None:
    """Change a leaf; copies the mappings along its path, so that the model's own tree stays unchanged."""
    for key in path[:-1]:
        params[key] = dict(params.get(key, {}))
        params = params[key]
    if path[-1] not in params:
        raise ValueError(f"adapter: it adds a bias {'/'.join(path)}, which the model does not have")
    params[path[-1]] = change(params[path[-1]])


def _merged(path: Path, spec: ParamSpec, delta: Delta, report: Report | None, weight: Any) -> Any:
    if isinstance(weight, Quantized | Split):
        return _requantized(path, weight, _sum(dense(weight).astype(jnp.float32), delta, spec), report)
    axis = input_axis(path, spec)
    total = _sum(jnp.moveaxis(weight.astype(jnp.float32), axis, -1), delta, spec)
    return jnp.moveaxis(total, -1, axis).astype(weight.dtype)


def _sum(weight: Float[Array, "*out k"], delta: Delta, spec: ParamSpec) -> Float[Array, "*out k"]:
    change = jnp.einsum("...or,...ri->...oi", _flat(delta, spec), delta.a, precision=jax.lax.Precision.HIGHEST)
    total = weight + change.reshape(weight.shape)
    return total if delta.magnitude is None else total * delta.magnitude[..., None]


def _requantized(path: Path, like: Any, total: Float[Array, "*out k"], report: Report | None) -> Any:
    try:
        made = quantized_again(like, total)
    except LayoutError as error:
        raise ValueError(f"adapter: {'/'.join(path)} cannot be quantised again: {error}") from error
    if report is not None:
        lost = jnp.linalg.norm(jnp.ravel(dense(made).astype(jnp.float32) - total))
        report(path, float(lost / jnp.linalg.norm(jnp.ravel(total))))
    return made


def _flat(delta: Delta, spec: ParamSpec) -> Shaped[Any, "*experts out rank"]:
    """Return B with its outputs flattened to one dimension: [*experts, out, rank]."""
    experts = spec.shape[: delta.a.ndim - 2]
    return delta.b.reshape(*experts, -1, delta.b.shape[-1])


def _with_bias(delta: Delta, bias: Any) -> jax.Array:
    return (bias.astype(jnp.float32) + delta.bias).astype(bias.dtype)
