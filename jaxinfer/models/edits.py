"""Early checks that a model edited by the user can be served and saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxinfer.models.model import Model
from jaxinfer.quant import is_stored
from jaxinfer.types import ParamSpec


def require_specified(model: Model) -> None:
    """Check that paths and shapes of the parameters match their specs.

    Raises:
        ValueError: names the first parameter that is missing, has no spec or has another shape.
    """
    specs, params = _leaves(model.specs), _leaves(model.params)
    for path, spec in specs.items():
        if path not in params:
            raise ValueError(f"{path} is missing from params: it must be {spec.shape}")
        if not hasattr(params[path], "dtype"):
            raise ValueError(f"{path} is a {type(params[path]).__name__}, and must be an array {spec.shape}")
        if tuple(params[path].shape) != spec.shape:
            raise ValueError(f"{path} is {tuple(params[path].shape)} and must be {spec.shape}")
    for path in params.keys() - specs.keys():
        raise ValueError(f"{path} has no spec: specs=... must have a ParamSpec for it (docs/functional.md)")


def require_one_dtype(model: Model) -> None:
    """Check that parameters whose specs name no dtype all have the dtype of the model: nothing is cast implicitly.

    Raises:
        ValueError: names the first parameter with another dtype.
    """
    params, dtype = _leaves(model.params), str(model.dtype)
    for path, spec in _leaves(model.specs).items():
        found = str(params[path].dtype)
        if found != (spec.dtype or dtype):
            first = next(name for name, leaf in params.items() if str(leaf.dtype) == dtype)
            why = f"{dtype} as {first}: LLM(model, dtype={dtype!r}) casts" if spec.dtype is None else spec.dtype
            raise ValueError(f"{path} is {found} and must be {why}")


def require_described(model: Model, config_json: Mapping[str, Any]) -> None:
    """Check that ``config_json`` describes the model and its parameters.

    Raises:
        ValueError: the config differs, the module was edited, or weights are quantised.
    """
    described: Any = model.family.config(config_json)
    if described != model.config:
        raise ValueError(
            f"the model's config is not that of its config.json ({_differences(described, model.config)}): "
            f"save(folder, config_json=...) writes another"
        )
    if model.module != model.family.module(model.config):
        raise ValueError(
            "the model's module was edited, and a folder holds no code: "
            "m.replace(module=m.family.module(m.config)).save(folder) saves the parameters"
        )
    if any(map(is_stored, jax.tree.leaves(model.params, is_leaf=is_stored))):
        raise ValueError("the model has quantised weights: python -m jaxinfer.convert writes those")


def _differences(before: Any, after: Any) -> str:
    fields = [field.name for field in dataclasses.fields(before)]
    named = [name for name in fields if getattr(before, name) != getattr(after, name)]
    return "; ".join(f"{name}: {getattr(before, name)!r} there, {getattr(after, name)!r} here" for name in named)


def _leaves(tree: Any) -> dict[str, Any]:
    """Return arrays, or specs, by path: ``layers_2.mlp.down``."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, ParamSpec))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}
