"""Sharding of heads over devices: evenly, or, if there are fewer KV heads than devices, after copying KV heads.

With ``copies`` a model of K KV heads becomes the same function with ``K * copies`` of them: each copy serves its own
share of the queries of its group. Only the shapes of the parameters change, so families need no support for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EngineConfigError
from jaxinfer.parallel.mesh import REPLICABLE, asked, devices_along
from jaxinfer.types import CacheSpec, ParamSpec, ParamTree, Source, map_specs, walk_specs

_KV, _KEY_AND_VALUE = "kv_heads", 2


def kv_copies(cache: CacheSpec, sizes: Mapping[str, int]) -> int:
    """Return the number of devices that hold each KV head, on a mesh of these sizes.

    Raises:
        EngineConfigError: the number of devices neither divides the KV heads nor is a multiple of them.
    """
    devices, heads = devices_along(sizes, _KV), {cache.sizes(layer)[0] for layer in cache.layers} or {cache.kv_heads}
    if cache.latent or all(each % devices == 0 for each in heads):
        return 1
    if len(heads) > 1:
        counts = " and ".join(map(str, sorted(heads)))
        raise EngineConfigError(f"{asked(sizes)} cannot be: it does not divide the {counts} KV heads of unlike layers")
    if devices % cache.kv_heads:
        raise EngineConfigError(
            f"{asked(sizes)} cannot be: it neither divides the model's {cache.kv_heads} KV heads nor "
            f"is a multiple of them"
        )
    return devices // cache.kv_heads


def with_copies(tree: ParamTree, copies: int) -> ParamTree:
    """Return the parameters of the same model with ``copies`` of each KV head.

    Raises:
        EngineConfigError: the copies cannot share the queries of a KV head evenly.
    """
    copied: ParamTree = map_specs(lambda path, spec: _with_copies(path[-1], spec, copies), tree)
    return copied


def _with_copies(name: str, spec: ParamSpec, copies: int) -> ParamSpec:
    if _KV not in spec.axes or copies == 1:
        return spec
    heads, members = _dimensions(spec)
    kv_heads, group = spec.shape[heads], spec.shape[members] - _KEY_AND_VALUE
    if group % copies:
        raise EngineConfigError(
            f"tensor_parallel_size = {kv_heads * copies} cannot be: {name} has {group} query heads to a KV head, which "
            f"{copies} devices cannot share evenly"
        )
    shape = list(spec.shape)
    shape[heads : members + 1] = kv_heads * copies, group // copies + _KEY_AND_VALUE
    sources = tuple(new for source in spec.sources for new in _sources(source, heads, group, copies))
    return dataclasses.replace(spec, shape=tuple(shape), sources=sources)


def _dimensions(spec: ParamSpec) -> tuple[int, int]:
    heads = spec.axes.index(_KV)
    assert spec.axes[heads + 1] == "group", spec
    return heads, heads + 1


def _sources(source: Source, heads: int, group: int, copies: int) -> list[Source]:
    """Split the queries among the copies; repeat each key or value for all of them."""
    before, found, after = source.where[: heads + 1], source.where[heads + 1 : heads + 2], source.where[heads + 2 :]
    queries, form = slice(0, group), list(source.reshape or ())
    if not form or found not in ((queries,), (group,), (group + 1,)):
        raise EngineConfigError(
            f"more devices than KV heads cannot be along tensor_parallel_size: the tensor {source.name} holds "
            "queries, keys and values together"
        )
    (place,) = found
    if isinstance(place, slice):
        form[heads : heads + 2] = form[heads] * copies, group // copies
        return [_moved(source, tuple(form), (*before, slice(0, group // copies), *after))]
    member = place - group + group // copies
    places = [(*before[:-1], slice(copy, None, copies), member, *after) for copy in range(copies)]
    return [_moved(source, tuple(form), where) for where in places]


def _moved(source: Source, reshape: tuple[int, ...], where: tuple[slice | int, ...]) -> Source:
    return Source(source.name, source.shape, source.transpose, reshape, where, source.part)


def copied(value: Any, spec: ParamSpec, copies: int) -> Any:
    """Return a parameter in the form of `with_copies`, from one with the axes of ``spec``. Abstract parameters stay
    abstract, and host arrays stay on the host."""
    if _KV not in spec.axes or copies == 1:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: copied(x, spec, copies), value)
    heads, members = _dimensions(spec)
    numbers: Any = jnp if isinstance(value, jax.Array) else np
    value = numbers.asarray(value)
    queries, rest = numbers.split(value, [value.shape[members] - _KEY_AND_VALUE], axis=members)
    form = list(queries.shape)
    form[heads : members + 1] = form[heads] * copies, form[members] // copies
    return numbers.concatenate([queries.reshape(form), numbers.repeat(rest, copies, axis=heads)], axis=members)


def as_copied(value: Any, spec: ParamSpec) -> Any:
    """Expand an array without copies of heads to as many copies as ``spec`` has."""
    if _KV not in spec.axes:
        return value
    heads, _ = _dimensions(spec)
    return copied(value, spec, spec.shape[heads] // value.shape[heads])


def without_copies(value: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """Invert `as_copied`, with a ``spec`` without copies."""
    if _KV not in spec.axes or value.shape == spec.shape:
        return value
    heads, members = _dimensions(spec)
    queries, rest = np.split(value, [value.shape[members] - _KEY_AND_VALUE], axis=members)
    form, copies = list(queries.shape), value.shape[heads] // spec.shape[heads]
    form[heads : members + 1] = spec.shape[heads], form[members] * copies
    first = (slice(None),) * heads + (slice(None, None, copies),)
    return np.concatenate([queries.reshape(form), rest[first]], axis=members)


def require_even(tree: ParamTree, sizes: Mapping[str, int]) -> None:
    """Raise EngineConfigError if mesh axes of these ``sizes`` do not divide a dimension that must be sharded."""
    for path, spec in walk_specs(tree):
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            devices = devices_along(sizes, axis)
            if size % devices and axis not in REPLICABLE:
                raise EngineConfigError(
                    f"{asked(sizes)} cannot be: {devices} devices do not divide the {size} {axis} of {'/'.join(path)}"
                )


def require_experts(tree: ParamTree, sizes: Mapping[str, int]) -> None:
    """Raise EngineConfigError if experts are to be sharded and the model has none."""
    devices = devices_along(sizes, "expert")
    if devices > 1 and not any("expert" in spec.axes for _, spec in walk_specs(tree)):
        raise EngineConfigError(f"expert_parallel_size = {devices} cannot be: the model has no experts")


def parts_of_copies(
    spec: ParamSpec, shape: tuple[int, ...], index: tuple[slice, ...]
) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]] | None:
    """Map a slice of a parameter to the same parameter without copies.

    Args:
        spec: in the form of `with_copies`.
        shape: shape without copies.
        index: the slice; (): all. It has all members of its heads.

    Returns:
        indices in the slice, each with its indices in the parameter without copies; None if the shapes do not match.
    """
    copies = _copies_between(spec, shape)
    if copies is None:
        return None
    heads, members = _dimensions(spec)
    ends = [part.indices(size)[:2] for part, size in zip(index or (slice(None),) * len(shape), spec.shape, strict=True)]
    queries, group = spec.shape[members] - _KEY_AND_VALUE, shape[members] - _KEY_AND_VALUE
    found = []
    for place in range(*ends[heads]):
        head, copy = divmod(place, copies)
        for to, of in ((slice(queries), copy * queries), (slice(queries, queries + _KEY_AND_VALUE), group)):
            where, part = [slice(None)] * len(shape), [slice(*each) for each in ends]
            at = place - ends[heads][0]
            where[heads : members + 1] = slice(at, at + 1), to
            part[heads : members + 1] = slice(head, head + 1), slice(of, of + (to.stop - (to.start or 0)))
            found.append((tuple(where), tuple(part)))
    return found


def _copies_between(spec: ParamSpec, shape: tuple[int, ...]) -> int | None:
    """Return the number of copies in a spec of each KV head in a shape; None: they are of different parameters."""
    if _KV not in spec.axes or len(shape) != len(spec.shape):
        return None
    heads, members = _dimensions(spec)
    copies, rest = divmod(spec.shape[heads], shape[heads])
    wanted = list(shape)
    wanted[heads : members + 1] = shape[heads] * copies, (shape[members] - _KEY_AND_VALUE) // copies + _KEY_AND_VALUE
    return None if rest or copies < 1 or tuple(wanted) != spec.shape else copies
