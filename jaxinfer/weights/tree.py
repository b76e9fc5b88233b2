"""Parameter trees: dtypes, renaming, and the mapping of checkpoint tensors to slices of fused parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.types import ParamSpec, ParamTree, Source, map_specs

Path = tuple[str, ...]
Index = tuple[slice, ...]
# Returns a new buffer with the slice of a parameter at an index; reads only the data that the slice needs.
Fill = Callable[[Index], np.ndarray]
# Chooses the slices to read and the devices that receive them; returns the leaf.
Place = Callable[[Path, ParamSpec, Fill], Any]

TARGETS: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


# Dtypes of the parts of quantised weights (`jaxinfer.quant.layouts`), which are copied without conversion.
PARTS: Mapping[str, np.dtype[Any]] = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (
        *(ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu),
        *(np.int8, np.uint8, np.int32),
    )
}


def target_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype for a parameter dtype name.

    Raises:
        ValueError: it is not float32, bfloat16 or float16.
    """
    if name not in TARGETS:
        raise ValueError(f"dtype must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


def dtype_of(spec: ParamSpec, model: np.dtype[Any]) -> np.dtype[Any]:
    """Return the parameter's own dtype, or the model's if it has none."""
    if spec.dtype is None:
        return model
    return PARTS[spec.dtype] if spec.dtype in PARTS else target_dtype(spec.dtype)


def with_names(specs: ParamTree, rename: Callable[[str], str]) -> ParamTree:
    """Return the specs with renamed checkpoint tensors."""

    def renamed(path: Path, spec: ParamSpec) -> ParamSpec:
        del path
        sources = (dataclasses.replace(source, name=rename(source.name)) for source in spec.sources)
        return dataclasses.replace(spec, sources=tuple(sources))

    return map_specs(renamed, specs)


def as_placed(tensor: Any, source: Source) -> Any:
    """Return a view of a checkpoint tensor, a numpy or JAX array, in the shape that it has in the parameter."""
    part = tensor[(*source.part, ...)]  # the ellipsis keeps a single value an array
    turned = part.T if source.transpose else part
    return turned if source.reshape is None else turned.reshape(source.reshape)


def as_stored(part: Any, source: Source) -> Any:
    """Return a source's values in their checkpoint shape, copied if needed: the inverse of ``as_placed``."""
    shape = _shape_only(source.shape)[(*source.part, ...)].shape
    if not source.transpose:
        return part.reshape(shape)
    return part.reshape(shape[::-1]).T


def overlap(
    shape: tuple[int, ...], index: Index, where: tuple[slice | int, ...]
) -> tuple[tuple[slice | int, ...], Index] | None:
    """Intersect the slice of a parameter at ``index`` with the index ``where`` of a source; None if they are disjoint.

    Returns:
        The intersection as an index into the slice, and as an index into the source's values (`as_placed`).
    """
    in_part: list[slice | int] = []
    in_source: list[slice] = []
    for axis, size in enumerate(shape):
        begin, end, _ = index[axis].indices(size) if axis < len(index) else (0, size, 1)
        place = where[axis] if axis < len(where) else slice(None)
        if isinstance(place, int):
            if not begin <= place < end:
                return None
            in_part.append(place - begin)
            continue
        first, last, step = place.indices(size)
        low, high = -((first - begin) // step) if begin > first else 0, -((first - min(end, last)) // step)
        if low >= high:
            return None
        at = first + low * step - begin
        in_part.append(slice(at, at + (high - low - 1) * step + 1, step))
        in_source.append(slice(low, high))
    return tuple(in_part), tuple(in_source)


def placed_size(source: Source) -> int:
    """Return the number of values that a source contributes."""
    return _shape_only(source.shape)[(*source.part, ...)].size


def check_spec(path: Path, spec: ParamSpec) -> None:
    """Raise ValueError if the sources of a spec do not match their index or do not fill the parameter."""
    label = "/".join(path)
    for source in spec.sources:
        have = as_placed(_shape_only(source.shape), source).shape
        room = _shape_only(spec.shape)[source.where].shape
        if have != room:
            raise ValueError(f"{label}: source {source.name!r} has the form {have} where there is room for {room}")
    filled = sum(placed_size(source) for source in spec.sources)
    if filled != math.prod(spec.shape):
        raise ValueError(f"{label}: its sources hold {filled} values of {math.prod(spec.shape)}")


def _shape_only(shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.zeros((), np.bool_), shape)


def whole_index(index: Index, shape: tuple[int, ...]) -> Index:
    """Return the index with a start and a stop for every dimension."""
    parts = index or (slice(None),) * len(shape)
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(parts, shape, strict=True))


def shape_at(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Return the shape of the slice of a parameter at an index."""
    return tuple(each.stop - each.start for each in whole_index(index, shape))


def leaf_of(params: Any, path: Path, spec: ParamSpec) -> Any:
    """Return the array at a path of nested parameters.

    Raises:
        ValueError: it is missing, or has another shape than its spec.
    """
    value = params
    for key in path:
        value = dict(value.items()).get(key) if hasattr(value, "items") else None
    if value is None:
        raise ValueError(f"the parameters lack {'/'.join(path)}")
    if tuple(value.shape) != spec.shape:
        raise ValueError(f"{'/'.join(path)} has shape {tuple(value.shape)} where its spec says {spec.shape}")
    return value
