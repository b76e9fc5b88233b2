"""LoRA banks: for each weight that adapters may change, arrays with a slot for each resident adapter."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.quant.lora_weight import LoRAWeight, Rows
from jaxinfer.types import EMBEDDING, HEAD, LoRATarget, ParamSpec, ParamTree

Path = tuple[str, ...]
Targets = Mapping[Path, LoRATarget]
# By part, the first key of a path (a layer), and by "rest/of/path:array".
Banks = Mapping[str, Mapping[str, Any]]
ALL_LINEAR = "all-linear"
_OF_VOCABULARY = {EMBEDDING: "embed_tokens", HEAD: "lm_head"}  # module names, independent of the checkpoint's names


class Banked(NamedTuple):
    """Parameters and banks, passed together to programs with adapters in place of the parameters."""

    params: Any
    banks: Banks


def lora_targets(
    specs: ParamTree, declared: ParamTree, rank: int, modules: Collection[str] = (ALL_LINEAR,)
) -> dict[Path, LoRATarget]:
    """Return the weights of a model that adapters can change, with the shapes of the adapter arrays.

    Args:
        specs: specs of the model; weights may be stored in any way.
        declared: specs as its family declares them.
        rank: rank of an adapter; a parameter fused from several checkpoint tensors has that multiple of it.
        modules: module names to include, see `module_names`; "all-linear": all products of the layers.
    """
    found = {}
    for path, node in _adaptable(specs):
        stored = not isinstance(node, ParamSpec)
        spec = _at(declared, weight_path(declared, path)) if stored else node
        if isinstance(spec, ParamSpec) and spec.inputs is not None and _is_named(path, spec, modules):
            found[path] = _target(path, spec, rank, tuple(node.shape) if stored else None)
    return found


def module_names(path: Path, spec: ParamSpec) -> set[str]:
    """Return the checkpoint module names (last component) of the weights in a parameter; the embedding table is always
    "embed_tokens" and the head "lm_head"."""
    if path in _OF_VOCABULARY:
        return {_OF_VOCABULARY[path]}
    return {source.name.removesuffix(".weight").rpartition(".")[2] for source in spec.sources}


def known_modules(declared: ParamTree) -> set[str]:
    """Return all names that ``modules`` of `lora_targets` may contain."""
    found = {ALL_LINEAR}
    for path, spec in _adaptable(declared):
        if isinstance(spec, ParamSpec) and spec.inputs is not None:
            found |= module_names(path, spec)
    return found


def _is_named(path: Path, spec: ParamSpec, modules: Collection[str]) -> bool:
    in_layers = path not in _OF_VOCABULARY
    return (in_layers and ALL_LINEAR in modules) or not module_names(path, spec).isdisjoint(modules)


def _adaptable(specs: ParamTree) -> Iterator[tuple[Path, Any]]:
    """Yield parameters of any storage; a tied head is yielded separately."""
    yield from _weights(specs)
    if weight_path(specs, HEAD) != HEAD and (table := _at(specs, EMBEDDING)) is not None:
        yield HEAD, table


def spec_at(declared: ParamTree, path: Path) -> ParamSpec | None:
    """Return the declared spec of a weight that adapters can change; None: there is no such weight."""
    spec = _at(declared, weight_path(declared, path))
    return spec if isinstance(spec, ParamSpec) and spec.inputs is not None else None


def weight_path(tree: Any, path: Path) -> Path:
    """Return the path of the weight that an adapter changes: a tied head is the embedding table."""
    return EMBEDDING if path == HEAD and _at(tree, HEAD) is None else path


def _target(path: Path, spec: ParamSpec, rank: int, stored: tuple[int, ...] | None = None) -> LoRATarget:
    """Return the target; ``stored``: the shape [*out, in] of a storage, including replicated heads."""
    if path == EMBEDDING:
        rows, width = spec.shape
        return LoRATarget((rank, rows), (width, rank), spec.axes[::-1], table=True)
    shape, axes = spec.shape, spec.axes
    if spec.inputs == 0:
        shape, axes = (*shape[1:], shape[0]), (*axes[1:], axes[0])
    shape = stored or shape
    experts = shape[:1] if axes[0] == "expert" else ()
    tensors = len({source.name for source in spec.sources})
    whole = rank * max(1, tensors // math.prod(experts))
    return LoRATarget((*experts, whole, shape[-1]), (*shape[:-1], whole), axes)


def _weights(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield parameters of any storage."""
    for name, node in tree.items():
        here = (*path, name)
        yield from _weights(node, here) if isinstance(node, Mapping) else [(here, node)]


def _at(tree: Any, path: Path) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def bank_specs(targets: Targets, slots: int, ranks: int = 1) -> dict[str, dict[str, ParamSpec]]:
    """Return the specs of the banks, sharded over devices like the weights that they adapt.

    Args:
        ranks: ranks of data-parallel attention, with ``slots`` slots each, concatenated by rank. A rank holds only its
            own slots, except for its experts, which hold the slots of all ranks, as tokens of all ranks reach them.
    """
    banks = dict[str, dict[str, ParamSpec]]()
    for path, target in targets.items():
        axes, own = _axes(target), banks.setdefault(path[0], {})
        first = "ranks" if ranks > 1 and target.axes[0] != "expert" else None
        for name, shape in target.shapes.items():
            dtype = None if name in ("a", "b") else "float32"
            whole, along = (ranks * slots, *shape), (first, *axes[name])
            own[bank_name(path, name)] = ParamSpec(whole, along, init="zeros", dtype=dtype)
    return banks


def slot_specs(targets: Targets) -> dict[str, dict[str, ParamSpec]]:
    """Return the specs of one slot of the banks, by part and by name."""
    banks = bank_specs(targets, 1)
    return {part: {name: _of_slot(spec) for name, spec in own.items()} for part, own in banks.items()}


def _of_slot(spec: ParamSpec) -> ParamSpec:
    return dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])


def _axes(target: LoRATarget) -> dict[str, tuple[str | None, ...]]:
    """Return the logical axes of an adapter's arrays."""
    *outs, inputs = target.axes
    experts = outs[: len(target.a) - 2]
    return {"a": (*experts, None, inputs), "b": (*outs, None), "magnitude": (*outs,), "bias": (*outs,)}


def bank_name(path: Path, array: str) -> str:
    """Return the name of an array within its part."""
    return f"{'/'.join(path[1:])}:{array}"


def with_banks(params: Any, banks: Banks, rows: Rows, targets: Targets) -> Any:
    """Return the parameters with the adapters of a step's rows."""
    for path, target in targets.items():
        arrays = {name: banks[path[0]][bank_name(path, name)] for name in target.shapes}
        place = weight_path(params, path)
        node = LoRAWeight(_at(params, place), **arrays, rows=rows, table=target.table, axes=target.axes)
        params = replaced(params, place, node)
    return params


def without_banks(function: Callable[..., Any], targets: Targets) -> Callable[..., Any]:
    """Wrap a function of parameters for steps without adapters; rows stay bitwise identical, see `LoRAWeight.rows`."""

    @functools.wraps(function)
    def apart(params: Any, *operands: Any) -> Any:
        for path, target in targets.items():
            place = weight_path(params, path)
            params = replaced(params, place, LoRAWeight(_at(params, place), table=target.table))
        return function(params, *operands)

    return apart


def replaced(tree: Any, path: Path, node: Any) -> Any:
    """Return the tree with another node at a path."""
    first, *rest = path
    return {**tree, first: replaced(tree[first], tuple(rest), node) if rest else node}


def write(
    banks: Mapping[str, Float[Array, "slots ..."]],
    slot: Int[Array, ""],
    arrays: Mapping[str, Float[Array, "..."]],
) -> dict[str, Float[Array, "slots ..."]]:
    """Return the banks of one part with an adapter written to a slot."""
    return {
        name: lax.dynamic_update_index_in_dim(bank, arrays[name].astype(bank.dtype), slot, 0)
        for name, bank in banks.items()
    }


def writing_over_ranks(arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Return `write` for data-parallel attention, where each rank has its own slots; the given slot is a global index.
    The result is for the mesh of the traced program.

    Args:
        arguments: arguments of `write`, as `jax.ShapeDtypeStruct` with shardings.
    """
    specs = jax.tree.map(lambda x: x.sharding.spec, arguments)
    own = [name for name, spec in specs[0].items() if spec[0] is not None]
    function = functools.partial(_write_of_rank, own=own)
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)


def _write_of_rank(
    banks: Mapping[str, Float[Array, "slots ..."]],
    slot: Int[Array, ""],
    arrays: Mapping[str, Float[Array, "..."]],
    own: Collection[str],
) -> dict[str, Float[Array, "slots ..."]]:
    """Write one rank's shard; ``own``: the banks of which this rank holds only its own slots."""
    written = {}
    for name, bank in banks.items():
        place = slot - lax.axis_index("dp_attn") * bank.shape[0] if name in own else slot
        near = jnp.clip(place, 0, bank.shape[0] - 1)  # for a slot of another rank: a local slot, kept unchanged
        kept = lax.dynamic_index_in_dim(bank, near, keepdims=False)
        array = jnp.where(place == near, arrays[name].astype(bank.dtype), kept)
        written[name] = lax.dynamic_update_index_in_dim(bank, array, near, 0)
    return written


def adapt(specs: Any, params: Any, declared: ParamTree, path: Path, delta: Any) -> tuple[Any, Any]:
    """Return trees of specs and of parameters in which the weight at a path has one adapter for all rows.

    Args:
        declared: see `lora_targets`.
        delta: `jaxinfer.lora.adapter.Delta`; its arrays may be traced.

    Raises:
        ValueError: there is no such weight, it cannot have an adapter or already has one, or shapes do not match.
    """
    spec, name, place = _at(declared, weight_path(declared, path)), ".".join(path), weight_path(params, path)
    table, rank = path == EMBEDDING, delta.a.shape[-2]
    if not isinstance(spec, ParamSpec) or spec.inputs is None or _has_adapter(_at(params, place), table):
        raise ValueError(f"{name} cannot have an adapter: it is no weight of the model, or has one already")
    target = _target(path, spec, 1)
    wanted = target._replace(a=(*target.a[:-2], rank, target.a[-1]), b=(*target.b[:-1], rank))
    given = {each: getattr(delta, each) for each in wanted.shapes}
    arrays = {each: jnp.asarray(value) for each, value in given.items() if value is not None}
    for each, value in arrays.items():
        if value.shape != wanted.shapes[each]:
            raise ValueError(f"{name}: {each} of the adapter is {value.shape} and must be {wanted.shapes[each]}")
    axes = _axes(target)
    leaves = {each: ParamSpec(value.shape, axes[each], dtype=str(value.dtype)) for each, value in arrays.items()}
    adapted, of_specs = (
        LoRAWeight(_at(tree, place), **own, table=table, axes=target.axes)
        for tree, own in ((params, arrays), (specs, leaves))
    )
    return replaced(specs, place, of_specs), replaced(params, place, adapted)


def _has_adapter(weight: Any, table: bool) -> bool:
    """Return whether a weight has an adapter of this kind: a tied table can have one for lookups, one for products."""
    return isinstance(weight, LoRAWeight) and (weight.table == table or _has_adapter(weight.base, table))
