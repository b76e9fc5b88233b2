"""Named arrays of a tree: nested dicts, `nnx.State`, `equinox` modules, or any other pytree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from jaxinfer.types import ParamGroup

_BOXES = ("value", "array")
"""Attributes that hold the array of a leaf: of an `nnx.Variable` or a `flax` box, and of a `haliax.NamedArray`."""


def named_arrays(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a tree by their paths, joined with dots: ``layers.0.attn.q_proj.w``.

    Raises:
        TypeError: a leaf is no array.
    """
    if isinstance(tree, ParamGroup):
        for name, array in tree.items():
            yield ".".join((*path, name)), array
        return
    if hasattr(tree, "shape") or any(hasattr(tree, name) for name in _BOXES):
        yield ".".join(path), _unboxed(tree)
        return
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    if len(children) == 1 and children[0][1] is tree:
        raise TypeError(f"{'.'.join(path) or 'weights'} is a {type(tree).__name__}, and must be an array")
    for (key, *_), child in children:
        yield from named_arrays(child, (*path, jax.tree_util.keystr((key,), simple=True)))


def _unboxed(leaf: Any) -> Any:
    for name in _BOXES:
        if not isinstance(leaf, jax.Array) and hasattr(leaf, name):
            return _unboxed(getattr(leaf, name))
    return leaf
