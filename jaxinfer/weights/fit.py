"""Weights that replace served ones: checked against their specs, and converted to the form in which they are served."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.parallel.processes import has_all, own_shards
from jaxinfer.quant import Quantized, Split, Unquantized, is_stored
from jaxinfer.quant.make.again import LayoutError, quantized_again
from jaxinfer.types import ParamSpec, ParamTree
from jaxinfer.weights.errors import WeightsError
from jaxinfer.weights.load import Deferred


def leaves_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the arrays of a tree with their paths: ``layers_2.mlp.down``."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def checksum_of(arrays: Iterable[tuple[str, Any]]) -> str:
    """Return a digest (BLAKE2b, 128 bits) of arrays, in the order of their paths: path, shape, dtype and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for path, array in sorted(arrays, key=lambda pair: pair[0]):
        values = np.ascontiguousarray(np.asarray(array))
        digest.update(f"{path} {values.shape} {values.dtype}".encode())
        digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def own_checksums(tree: Any) -> dict[str, tuple[bool, str]]:
    """Return a digest of each array of a tree, by path, as far as this process has it, and whether it has all of it."""
    found = {}
    for path, array in leaves_of(tree):
        if isinstance(array, jax.ShapeDtypeStruct):
            continue
        whole = not isinstance(array, jax.Array) or has_all(array)
        parts = [(path, array)] if whole else [(f"{path} {at}", part) for at, part in enumerate(own_shards(array))]
        found[path] = whole, checksum_of(parts)
    return found


def selected(specs: ParamTree, given: Any, *, partial: bool, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the specs of the given parameters.

    Raises:
        WeightsError: a parameter is unknown, or missing while not ``partial``.
    """
    if not isinstance(given, Mapping):
        raise wrong(".".join(path) or "params", f"is a {type(given).__name__}, and must be a dict")
    for name in given:
        if name not in specs:
            raise wrong(".".join((*path, name)), "is not a parameter of the model")
    missing = [name for name in specs if name not in given]
    if missing and not partial:
        raise wrong(".".join((*path, missing[0])), "is missing")
    return {
        name: selected(node, given[name], partial=partial, path=(*path, name)) if isinstance(node, dict) else node
        for name, node in specs.items()
        if name in given
    }


def map_nodes(
    function: Callable[[tuple[str, ...], Any, Any], Any], specs: Any, given: Any, path: tuple[str, ...]
) -> Any:
    """Check the nodes of two trees, of which a stored weight is one, by ``function(path, spec, value)``; return what
    makes the tree of its results."""
    if isinstance(specs, dict):
        made = {name: map_nodes(function, node, given[name], (*path, name)) for name, node in specs.items()}
        return lambda: {name: make() for name, make in made.items()}
    return function(path, specs, given)


def fitted(
    path: tuple[str, ...],
    spec: Any,
    value: Any,
    *,
    declared: Mapping[tuple[str, ...], ParamSpec],
    dtype: str,
    cast: bool,
    copy: bool,
) -> Callable[[], Any]:
    """Check a given weight; return what converts it to the form of the served one.

    Args:
        spec: that of the served weight, stored or not.
        value: an array in the shape that the family declares, or a weight stored like the served one.
        declared: specs of the family.

    Raises:
        WeightsError: it has another shape or dtype, or cannot be stored in this form.
    """
    name, array = ".".join(path), functools.partial(_array, dtype=dtype, cast=cast, copy=copy)
    if not is_stored(spec):
        return array(name, spec, value)
    if isinstance(value, type(spec)):
        return _stored_alike(name, spec, value, array)
    if (plain := declared.get(path)) is None or not isinstance(spec, Quantized | Split | Unquantized):
        raise wrong(name, f"must be a {type(spec).__name__}, like the served weight")
    if isinstance(spec, Unquantized):
        make = array(name, dataclasses.replace(plain, dtype=spec.weight.dtype), value)
        return lambda: spec.rebuilt({"weight": _turned(make(), plain, outputs_first=spec.layout == "in last")})
    _require_shape(name, plain.shape, value)
    try:
        jax.eval_shape(functools.partial(quantized_again, spec), jax.ShapeDtypeStruct(spec.shape, np.float32))
    except LayoutError as error:
        raise wrong(name, f"cannot be quantised again: {error}") from error
    return lambda: quantized_again(spec, jnp.asarray(_turned(value, plain, outputs_first=True)))


def _stored_alike(name: str, spec: Any, value: Any, array: Callable[[str, ParamSpec, Any], Any]) -> Callable[[], Any]:
    form: Any
    own: Any
    specs, form = jax.tree.flatten(spec, is_leaf=is_spec)
    leaves, own = jax.tree.flatten(value)
    if own != form:
        raise wrong(name, "is stored in another layout than the served weight")
    made = [array(name, one, leaf) for one, leaf in zip(specs, leaves, strict=True)]
    return lambda: form.unflatten([make() for make in made])


def _turned(value: Any, spec: ParamSpec, *, outputs_first: bool) -> Any:
    """Return a matrix with its outputs, or its inputs, first; on the host if it is turned there. It is read."""
    if (spec.inputs == 0) != outputs_first:
        return value if isinstance(value, jax.Array) else np.asarray(value)
    turn = (0, -1) if outputs_first else (-1, 0)
    if isinstance(value, jax.Array) and _platform(value) != "cpu":
        return jnp.moveaxis(value, *turn)
    return np.array(np.moveaxis(np.asarray(value), *turn), order="C")


def _array(path: str, spec: ParamSpec, value: Any, *, dtype: str, cast: bool, copy: bool) -> Callable[[], Any]:
    _require_shape(path, spec.shape, value)
    if isinstance(value, jax.Array) and value.is_deleted():
        raise wrong(path, "was deleted: a program that donates its arguments took it")
    wanted = jnp.dtype(spec.dtype or dtype)
    if value.dtype != wanted and not cast:
        raise wrong(path, f"is {value.dtype}, and must be {wanted}: cast=True converts it")
    if isinstance(value, Deferred) and value.dtype == wanted:
        return lambda: value  # read where it is placed, by shards
    if isinstance(value, jax.Array) and (value.dtype == wanted or _platform(value) != "cpu"):
        if value.dtype != wanted:
            return lambda: value.astype(wanted)
        return lambda: jax.device_put(value, value.sharding, may_alias=False) if copy else value
    return lambda: np.array(value, wanted)  # a copy: an array of the caller may change


def is_spec(node: Any) -> bool:
    return isinstance(node, ParamSpec)


def as_declared(weight: Any, spec: ParamSpec) -> Any:
    """Return an unquantised weight as an array in the shape of its family's ``spec``; others stay as they are."""
    if not isinstance(weight, Unquantized) or (spec.inputs == 0) == (weight.layout == "in first"):
        return weight.weight if isinstance(weight, Unquantized) else weight
    return jnp.moveaxis(weight.weight, *((0, -1) if weight.layout == "in first" else (-1, 0)))


def _platform(array: jax.Array) -> str:
    return next(iter(array.devices())).platform


def _require_shape(path: str, shape: tuple[int, ...], value: Any) -> None:
    found = tuple(value.shape) if hasattr(value, "shape") and hasattr(value, "dtype") else type(value).__name__
    if found != tuple(shape):
        raise wrong(path, f"is {found}, and must be {tuple(shape)}")


def placed_node(own: Any, placed: Any, name: str) -> Any:
    """Return a node with the placed arrays, as far as they are in its form; others stay the given ones."""
    while isinstance(placed, list):
        placed = next((each for each in placed if each), {})
    if name not in placed:
        return own
    return jax.tree.map(_placed_or_given, own, placed[name], is_leaf=is_stored)


def _placed_or_given(own: Any, placed: Any) -> Any:
    if is_stored(own):
        forms: list[Any] = [jax.tree.flatten(jax.tree.map(np.shape, node)) for node in (own, placed)]
        return placed if forms[0] == forms[1] else own
    array = placed.weight if isinstance(placed, Unquantized) else placed  # wrapped for a kernel
    if array.shape == own.shape:
        return array
    return np.asarray(own) if isinstance(own, Deferred) else own


def require_finite(node: Any, name: str) -> None:
    for path, array in leaves_of({name: node}):
        for part in own_shards(array) if isinstance(array, jax.Array) else [np.asarray(array)]:
            if jnp.issubdtype(part.dtype, jnp.floating) and not np.isfinite(part).all():
                raise wrong(path, "has NaN or infinite values")


def wrong(place: str, reason: str) -> WeightsError:
    """Return the error for a parameter, or another argument of an update."""
    joint = "" if reason.startswith(("=", ":")) else " "
    return WeightsError(f"{place}{joint}{reason}", place)
