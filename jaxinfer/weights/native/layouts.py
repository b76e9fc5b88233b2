"""JSON encoding of the layouts of quantised weights, for the manifest of a converted folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.quant import Quantized, Split
from jaxinfer.quant.layouts import Blocks, Codebook, Grouped, Layout, Part
from jaxinfer.types import ParamSpec, ParamTree
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.tree import PARTS, TARGETS

_LAYOUTS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (Grouped, Codebook, Blocks)}
_MOST_PIECES = 1000


def describe(specs: ParamTree, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Encode the layouts of a tree's quantised weights as JSON by name, for `described`; skip other arrays."""
    found: dict[str, Any] = {}
    for key, node in specs.items():
        if isinstance(node, Quantized | Split):
            found["/".join((*path, key))] = _plain(node)
        elif isinstance(node, Mapping):
            found |= describe(node, (*path, key))
    return found


def _plain(node: Any) -> dict[str, Any]:
    if isinstance(node, Split):
        pieces = [{**_plain(piece), "size": piece.shape[node.axis]} for piece in node.pieces]
        return {"kind": "split", "axis": node.axis, "pieces": pieces}
    if isinstance(node, Quantized):
        layout: Any = node.layout
        fields = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
        return {"kind": "quantised", "layout": type(layout).__name__, "fields": fields}
    return {"kind": "array"}


def described(specs: ParamTree, storages: Mapping[str, Any], dtype: str) -> ParamTree:
    """Return the specs with quantised storages for the weights that a manifest names.

    Args:
        dtype: dtype of the model.

    Raises:
        CheckpointError: the manifest is inconsistent with the specs.
    """
    left = dict(storages)
    made = _with_storages(specs, left, dtype, ())
    if left:
        raise CheckpointError(f"the manifest describes a weight that the model does not have: {quoted(min(left))}")
    return made


def _with_storages(tree: ParamTree, left: dict[str, Any], dtype: str, path: tuple[str, ...]) -> ParamTree:
    made: dict[str, Any] = {}
    for key, node in tree.items():
        name = "/".join((*path, key))
        if isinstance(node, Mapping):
            made[key] = _with_storages(node, left, dtype, (*path, key))
        elif isinstance(node, ParamSpec) and name in left:
            made[key] = _stored(name, node, left.pop(name), dtype)
        else:
            made[key] = node
    return made


def _stored(name: str, spec: ParamSpec, plain: Any, dtype: str) -> Any:
    if spec.inputs is None:
        raise CheckpointError(f"the manifest describes {quoted(name)} as quantised, which it cannot be")
    first = spec.inputs == 0
    axes = (*spec.axes[1:], spec.axes[0]) if first else spec.axes
    shape = (*spec.shape[1:], spec.shape[0]) if first else spec.shape
    try:
        return _Storage(axes, shape[-1], dtype).made(plain, shape[:-1])
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"the manifest describes {quoted(name)} in a way that cannot be: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Storage:
    """Builds the specs of a weight ``[*out, in]``."""

    axes: tuple[str | None, ...]
    inputs: int
    dtype: str

    def made(self, plain: Any, out: tuple[int, ...]) -> Any:
        match plain["kind"]:
            case "split":
                return self._split(plain["axis"], plain["pieces"], out)
            case "quantised":
                return self._quantized(_layout(plain), out)
            case "array":
                return ParamSpec((*out, self.inputs), self.axes)
        raise ValueError("its kind is unknown")

    def _split(self, axis: Any, pieces: Any, out: tuple[int, ...]) -> Split:
        sizes = [piece["size"] for piece in pieces[:_MOST_PIECES]]
        if type(axis) is not int or not 0 <= axis < len(out) or not all(type(size) is int for size in sizes):
            raise ValueError("it is not split along a dimension of its outputs")
        if min(sizes) < 1 or sum(sizes) != out[axis] or any(piece["kind"] == "split" for piece in pieces):
            raise ValueError("its pieces do not make it up")
        made = (self.made(piece, (*out[:axis], piece["size"], *out[axis + 1 :])) for piece in pieces)
        return Split(tuple(made), axis)

    def _quantized(self, layout: Layout, out: tuple[int, ...]) -> Quantized:
        arrays = {}
        for name, part in layout.parts(self.inputs).items():
            outs, inner = (out, self.axes[:-1]), (part.shape, self._along(part))
            (shape, axes), (more, along) = (inner, outs) if part.first else (outs, inner)
            arrays[name] = _part((*shape, *more), (*axes, *along), part)
        for name, part in layout.input_parts(self.inputs).items():
            arrays[name] = _part(part.shape, self._along(part), part)
        return Quantized(arrays, layout, self.axes, self.dtype, self.inputs)

    def _along(self, part: Part) -> tuple[str | None, ...]:
        return (self.axes[-1] if part.along else None, *(None,) * (len(part.shape) - 1)) if part.shape else ()


def _part(shape: tuple[int, ...], axes: tuple[str | None, ...], part: Part) -> ParamSpec:
    if part.dtype not in PARTS and part.dtype not in TARGETS:
        raise ValueError(f"parts of {part.dtype!r} are unknown")
    return ParamSpec(shape, axes, dtype=part.dtype)


def _layout(plain: Mapping[str, Any]) -> Layout:
    kind = _LAYOUTS[plain["layout"]]
    stored = plain["fields"]
    fields = {field.name: (field, stored.get(field.name, field.default)) for field in dataclasses.fields(kind)}
    layout: Layout = kind(**{name: _value(str(field.type), value) for name, (field, value) in fields.items()})
    return layout


def _value(kind: str, value: Any) -> Any:
    """Return a field's value if its type is exactly that of the field, else raise ValueError."""
    if kind.startswith("tuple") and isinstance(value, list | tuple):
        return tuple(float(_value("float", each)) for each in value[:256])
    wanted = {"int": int, "str": str, "bool": bool, "float": float}.get(kind)
    if type(value) is wanted or (wanted is float and type(value) is int):
        return value
    raise ValueError("a field has a value of another type")
