"""Banks of adapters: for each weight that adapters may change, arrays with a place for each of some adapters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.quant.adapted import Adapted, Rows
from jaxinfer.types import LoRATarget, ParamSpec, ParamTree

Path = tuple[str, ...]
Targets = Mapping[Path, LoRATarget]
# By part, the first of a path (a layer), and by "rest/of/path:array".
Banks = Mapping[str, Mapping[str, Any]]


class Banked(NamedTuple):
    """Parameters and banks: what programs with adapters take in place of parameters."""

    params: Any
    banks: Banks


def lora_targets(specs: ParamTree, declared: ParamTree, rank: int) -> dict[Path, LoRATarget]:
    """All weights of a model's layers that are read by products, with the shapes that an adapter's arrays have there.

    Tables of the vocabulary are none: a head's bank would cost every step that has any adapter.

    Args:
        specs: the model's; weights may be stored in any way.
        declared: as its family declares them.
        rank: of an adapter; one of a weight that is several tensors of a checkpoint has as many times that.
    """
    found = {}
    for path, node in _weights(specs):
        spec = node if isinstance(node, ParamSpec) else _at(declared, path)
        if isinstance(spec, ParamSpec) and spec.inputs is not None and "vocab" not in spec.axes:
            found[path] = _target(spec, rank)
    return found


def _target(spec: ParamSpec, rank: int) -> LoRATarget:
    shape, axes = spec.shape, spec.axes
    if spec.inputs == 0:
        shape, axes = (*shape[1:], shape[0]), (*axes[1:], axes[0])
    experts = shape[:1] if axes[0] == "expert" else ()
    tensors = len({source.name for source in spec.sources})
    whole = rank * max(1, tensors // math.prod(experts))
    return LoRATarget((*experts, whole, shape[-1]), (*shape[:-1], whole), axes)


def _weights(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Parameters, whatever stores them."""
    for name, node in tree.items():
        here = (*path, name)
        yield from _weights(node, here) if isinstance(node, Mapping) else [(here, node)]


def _at(tree: Any, path: Path) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def bank_specs(targets: Targets, slots: int) -> dict[str, dict[str, ParamSpec]]:
    """The banks, spread over devices as the weights are that they adapt."""
    banks = dict[str, dict[str, ParamSpec]]()
    for path, target in targets.items():
        experts = target.axes[: len(target.a) - 2]
        axes = {"a": (*experts, None, target.axes[-1]), "b": (*target.axes[:-1], None), "magnitude": target.axes[:-1]}
        axes["bias"] = axes["magnitude"]
        own = banks.setdefault(path[0], {})
        for name, shape in target.shapes.items():
            dtype = None if name in ("a", "b") else "float32"
            own[bank_name(path, name)] = ParamSpec((slots, *shape), (None, *axes[name]), init="zeros", dtype=dtype)
    return banks


def bank_name(path: Path, array: str) -> str:
    """The name of an array within its part."""
    return f"{'/'.join(path[1:])}:{array}"


def with_banks(params: Any, banks: Banks, rows: Rows, targets: Targets) -> Any:
    """The parameters with the adapters of a step's rows."""
    for path, target in targets.items():
        arrays = {name: banks[path[0]][bank_name(path, name)] for name in target.shapes}
        params = replaced(params, path, Adapted(_at(params, path), **arrays, rows=rows, axes=target.axes))
    return params


def replaced(tree: Any, path: Path, node: Any) -> Any:
    """The tree with another node at a path."""
    first, *rest = path
    return {**tree, first: replaced(tree[first], tuple(rest), node) if rest else node}


def write(
    banks: Mapping[str, Float[Array, "slots *shape"]], slot: Int[Array, ""], arrays: Mapping[str, Float[Array, "*shape"]]
) -> dict[str, Float[Array, "slots *shape"]]:
    """One part's banks with an adapter in a slot."""
    return {
        name: lax.dynamic_update_index_in_dim(bank, arrays[name].astype(bank.dtype), slot, 0)
        for name, bank in banks.items()
    }
