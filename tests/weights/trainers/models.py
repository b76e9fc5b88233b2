"""Tiny models for tests of name maps."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.models.model import Model, abstract
from jaxinfer.weights import init_params


def random_model(config_json: Mapping[str, Any], dtype: str = "float32", seed: int = 0) -> Model:
    """Return a model with random parameters, norms and biases included."""
    model = abstract(config_json, dtype)
    params = init_params(model.specs, seed, dtype)
    leaves, form = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    noisy = [leaf + rng.uniform(-0.25, 0.25, leaf.shape).astype(leaf.dtype) for leaf in leaves]
    return model.replace(params=jax.tree.unflatten(form, noisy))


def assert_equal(params: Any, expected: Any) -> None:
    """Require trees of the same paths, dtypes and bits."""
    one, other = (jax.tree_util.tree_leaves_with_path(tree) for tree in (params, expected))
    assert [path for path, _ in one] == [path for path, _ in other]
    for (path, value), (_, wanted) in zip(one, other, strict=True):
        assert (value.shape, value.dtype) == (wanted.shape, wanted.dtype), path
        assert np.asarray(value).tobytes() == np.asarray(wanted).tobytes(), path


def by_path(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Return a node of a nested dict."""
    return by_path(tree[path[0]], path[1:]) if path else tree
