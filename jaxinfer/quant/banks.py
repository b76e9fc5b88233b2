"""Banks of adapters: for each weight that adapters may change, arrays with a place for each of some adapters."""

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

from jaxinfer.quant.adapted import Adapted, Rows
from jaxinfer.types import EMBEDDING, HEAD, LoRATarget, ParamSpec, ParamTree

Path = tuple[str, ...]
Targets = Mapping[Path, LoRATarget]
# By part, the first of a path (a layer), and by "rest/of/path:array".
Banks = Mapping[str, Mapping[str, Any]]
ALL_LINEAR = "all-linear"
_OF_VOCABULARY = {EMBEDDING: "embed_tokens", HEAD: "lm_head"}  # whatever a checkpoint calls them


class Banked(NamedTuple):
    """Parameters and banks: what programs with adapters take in place of parameters."""

    params: Any
    banks: Banks


def lora_targets(
    specs: ParamTree, declared: ParamTree, rank: int, modules: Collection[str] = (ALL_LINEAR,)
) -> dict[Path, LoRATarget]:
    """Weights of a model that are read by products or by tokens, with the shapes that an adapter's arrays have there.

    Args:
        specs: the model's; weights may be stored in any way.
        declared: as its family declares them.
        rank: of an adapter; one of a weight that is several tensors of a checkpoint has as many times that.
        modules: of which weights, see `module_names`; "all-linear": of all products of the layers.
    """
    found = {}
    for path, node in _adaptable(specs):
        stored = not isinstance(node, ParamSpec)
        spec = _at(declared, weight_path(declared, path)) if stored else node
        if isinstance(spec, ParamSpec) and spec.inputs is not None and _is_named(path, spec, modules):
            found[path] = _target(path, spec, rank, tuple(node.shape) if stored else None)
    return found


def module_names(path: Path, spec: ParamSpec) -> set[str]:
    """The modules whose weights lie in a parameter, as a checkpoint calls them: the last part of their names. The table
    of embeddings is "embed_tokens" and the head "lm_head", however a family calls them."""
    if path in _OF_VOCABULARY:
        return {_OF_VOCABULARY[path]}
    return {source.name.removesuffix(".weight").rpartition(".")[2] for source in spec.sources}


def known_modules(declared: ParamTree) -> set[str]:
    """All that ``modules`` of `lora_targets` may name."""
    found = {ALL_LINEAR}
    for path, spec in _adaptable(declared):
        if isinstance(spec, ParamSpec) and spec.inputs is not None:
            found |= module_names(path, spec)
    return found


def _is_named(path: Path, spec: ParamSpec, modules: Collection[str]) -> bool:
    in_layers = path not in _OF_VOCABULARY
    return (in_layers and ALL_LINEAR in modules) or not module_names(path, spec).isdisjoint(modules)


def _adaptable(specs: ParamTree) -> Iterator[tuple[Path, Any]]:
    """Parameters, whatever stores them; a tied head is one of its own."""
    yield from _weights(specs)
    if weight_path(specs, HEAD) != HEAD and (table := _at(specs, EMBEDDING)) is not None:
        yield HEAD, table


def spec_at(declared: ParamTree, path: Path) -> ParamSpec:
    """The spec of a weight that an adapter changes, in the tree that a family declares."""
    spec = _at(declared, weight_path(declared, path))
    assert isinstance(spec, ParamSpec)
    return spec


def weight_path(tree: Any, path: Path) -> Path:
    """Where the weight lies that an adapter changes: a tied head is the table of embeddings."""
    return EMBEDDING if path == HEAD and _at(tree, HEAD) is None else path


def _target(path: Path, spec: ParamSpec, rank: int, stored: tuple[int, ...] | None = None) -> LoRATarget:
    """``stored``: the shape [*out, in] of a storage, where copies of heads count."""
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
    """Parameters, whatever stores them."""
    for name, node in tree.items():
        here = (*path, name)
        yield from _weights(node, here) if isinstance(node, Mapping) else [(here, node)]


def _at(tree: Any, path: Path) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def bank_specs(targets: Targets, slots: int, ranks: int = 1) -> dict[str, dict[str, ParamSpec]]:
    """The banks, spread over devices as the weights are that they adapt.

    Args:
        ranks: of data-parallel attention, with so many slots each, one rank's behind another's. Each has its own alone;
            of the experts that it has, it has the slots of all, whose tokens come to them.
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
    """What one slot of the banks takes, by part and by name."""
    banks = bank_specs(targets, 1)
    return {part: {name: _of_slot(spec) for name, spec in own.items()} for part, own in banks.items()}


def _of_slot(spec: ParamSpec) -> ParamSpec:
    return dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])


def _axes(target: LoRATarget) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of an adapter's arrays."""
    *outs, inputs = target.axes
    experts = outs[: len(target.a) - 2]
    return {"a": (*experts, None, inputs), "b": (*outs, None), "magnitude": (*outs,), "bias": (*outs,)}


def bank_name(path: Path, array: str) -> str:
    """The name of an array within its part."""
    return f"{'/'.join(path[1:])}:{array}"


def with_banks(params: Any, banks: Banks, rows: Rows, targets: Targets) -> Any:
    """The parameters with the adapters of a step's rows."""
    for path, target in targets.items():
        arrays = {name: banks[path[0]][bank_name(path, name)] for name in target.shapes}
        place = weight_path(params, path)
        node = Adapted(_at(params, place), **arrays, rows=rows, table=target.table, axes=target.axes)
        params = replaced(params, place, node)
    return params


def without_banks(function: Callable[..., Any], targets: Targets) -> Callable[..., Any]:
    """A function of parameters as it is for steps in which no row has an adapter, see `Adapted.rows`."""

    @functools.wraps(function)
    def apart(params: Any, *operands: Any) -> Any:
        for path, target in targets.items():
            place = weight_path(params, path)
            params = replaced(params, place, Adapted(_at(params, place), table=target.table))
        return function(params, *operands)

    return apart


def replaced(tree: Any, path: Path, node: Any) -> Any:
    """The tree with another node at a path."""
    first, *rest = path
    return {**tree, first: replaced(tree[first], tuple(rest), node) if rest else node}


def write(
    banks: Mapping[str, Float[Array, "slots *shape"]],
    slot: Int[Array, ""],
    arrays: Mapping[str, Float[Array, "*shape"]],
) -> dict[str, Float[Array, "slots *shape"]]:
    """One part's banks with an adapter in a slot."""
    return {
        name: lax.dynamic_update_index_in_dim(bank, arrays[name].astype(bank.dtype), slot, 0)
        for name, bank in banks.items()
    }


def writing_over_ranks(arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """`write` where the ranks of data-parallel attention have slots each, one rank's behind another's; the slot that is
    given is among those of all. For the mesh that it is traced for.

    Args:
        arguments: of `write`, as `jax.ShapeDtypeStruct` with shardings.
    """
    specs = jax.tree.map(lambda x: x.sharding.spec, arguments)
    own = [name for name, spec in specs[0].items() if spec[0] is not None]
    function = functools.partial(_write_of_rank, own=own)
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)


def _write_of_rank(
    banks: Mapping[str, Float[Array, "slots *shape"]],
    slot: Int[Array, ""],
    arrays: Mapping[str, Float[Array, "*shape"]],
    own: Collection[str],
) -> dict[str, Float[Array, "slots *shape"]]:
    """``own``: the banks of which this rank has its own slots alone."""
    written = {}
    for name, bank in banks.items():
        place = slot - lax.axis_index("dp_attn") * bank.shape[0] if name in own else slot
        near = jnp.clip(place, 0, bank.shape[0] - 1)  # of another rank's slot: one that stays as it is
        kept = lax.dynamic_index_in_dim(bank, near, keepdims=False)
        array = jnp.where(place == near, arrays[name].astype(bank.dtype), kept)
        written[name] = lax.dynamic_update_index_in_dim(bank, array, near, 0)
    return written


def adapt(specs: Any, params: Any, declared: ParamTree, path: Path, delta: Any) -> tuple[Any, Any]:
    """Trees of specs and of parameters in which the weight at a path has one adapter, for all rows.

    Args:
        declared: see `lora_targets`.
        delta: `jaxinfer.lora.adapter.Delta`; its arrays may be traced.

    Raises:
        ValueError: there is no such weight, it can have no adapter, or has one already, or of other shapes.
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
        Adapted(_at(tree, place), **own, table=table, axes=target.axes)
        for tree, own in ((params, arrays), (specs, leaves))
    )
    return replaced(specs, place, of_specs), replaced(params, place, adapted)


def _has_adapter(weight: Any, table: bool) -> bool:
    """Whether a weight has one already of that kind: a tied table may have one for lookups and one for products."""
    return isinstance(weight, Adapted) and (weight.table == table or _has_adapter(weight.base, table))
