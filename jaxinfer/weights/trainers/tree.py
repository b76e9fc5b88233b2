"""Named arrays of a tree: nested dicts, `nnx.State`, `equinox` modules, or any other pytree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.types import ParamGroup


def named_arrays(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a tree by their paths, joined with dots: ``layers.0.attn.q_proj.w``.

    Raises:
        TypeError: a leaf is no array.
    """
    if isinstance(tree, Mapping | ParamGroup):
        for key, child in tree.items():
            yield from named_arrays(child, (*path, str(key)))
        return
    opened = _opened(tree)
    if opened is not tree:
        yield from named_arrays(opened, path)
        return
    if hasattr(tree, "shape"):
        yield ".".join(path), tree
        return
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    if len(children) == 1 and children[0][1] is tree:
        raise TypeError(f"{'.'.join(path) or 'weights'} is a {type(tree).__name__}, and must be an array")
    for (key, *_), child in children:
        yield from named_arrays(child, (*path, jax.tree_util.keystr((key,), simple=True)))


def _opened(node: Any) -> Any:
    """Return the array in a leaf of a library: an `nnx.Variable`, a box of `flax`, or a `haliax.NamedArray`."""
    if isinstance(node, jax.Array | np.ndarray):
        return node
    for method in ("get_value", "unbox"):
        if hasattr(node, method):
            return getattr(node, method)()
    return getattr(node, "array", node)
