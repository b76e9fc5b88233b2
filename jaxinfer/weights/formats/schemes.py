"""Schemes of the ``config_groups`` of compressed-tensors, and the assignment of weights to groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.patterns import Patterns

_FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_NAIVE = "naive-quantized"  # name of the first two formats in older versions
_STRATEGIES = {
    "float-quantized": ("tensor", "channel", "block"),
    "int-quantized": ("tensor", "channel"),
    "pack-quantized": ("tensor", "channel", "group"),
    "nvfp4-pack-quantized": ("tensor_group",),
    "mxfp4-pack-quantized": ("group",),
}
_BITS = {"float-quantized": (8,), "int-quantized": (8,), "pack-quantized": (4, 8)}
_TYPES = {"int-quantized": "int", "pack-quantized": "int"}
_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
_ACTIVATIONS = {("float", "float-quantized"): "float8_e4m3fn", ("int", "int-quantized"): "int8"}
_REGEX = "re:"


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Quantisation scheme of a group of weights.

    Attributes:
        format: one of float-, int-, pack-, nvfp4-pack- and mxfp4-pack-quantized.
        bits: bits per code.
        strategy: unit that has a scale: "tensor", "channel", "group", "block" or "tensor_group".
        group: inputs that share a scale; 0: all.
        block: rows and columns that share a scale.
        symmetric: there are no zero points.
        activations, activation_group, static: as in `Grouped`.
    """

    format: str
    bits: int
    strategy: str
    group: int
    block: tuple[int, int] | None
    symmetric: bool
    activations: str = ""
    activation_group: int = 0
    static: bool = False


class Schemes:
    """The groups of a configuration.

    Raises:
        CheckpointError: a group or a global field has an unknown value.
    """

    def __init__(self, config: Fields) -> None:
        for name in ("sparsity_config", "transform_config"):
            _refuse_unless_empty(config, name)
        self._patterns = Patterns("config_groups")
        groups = config.child("config_groups")
        self._groups = [(_targets(group), _scheme(config, group)) for group in map(groups.child, groups.values)]
        if not self._groups:
            raise config.refused("config_groups", ("one group or more",))

    def of(self, module: str) -> Scheme:
        """Return the scheme of a module: exact names take precedence over patterns, and patterns over classes.

        Raises:
            CheckpointError: there are several groups, and none targets the module.
        """
        if len(self._groups) == 1:
            return self._groups[0][1]
        for fits in (str.__eq__, self._fits, _is_class):
            for targets, scheme in self._groups:
                if any(fits(target, module) for target in targets):
                    return scheme
        raise CheckpointError(f"{quoted(module)} is quantised, but no group of config_groups has it among its targets")

    def _fits(self, target: str, module: str) -> bool:
        """Return whether a target "re:..." matches at the start of a module's name."""
        return target.startswith(_REGEX) and self._patterns.match(target.removeprefix(_REGEX), module)


def _scheme(config: Fields, group: Fields) -> Scheme:
    weights = group.child("weights")
    form = _format(config, group, weights)
    weights.choice("type", (_TYPES.get(form, "float"),), None)
    bits = weights.choice("num_bits", _BITS.get(form, (4,)))
    strategy = weights.choice("strategy", _STRATEGIES[form], "tensor")
    size = 0
    if form in _GROUPS:
        size = weights.choice("group_size", (_GROUPS[form],))
    elif strategy == "group":
        size = weights.group_size("group_size")
    block = weights.block("block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise weights.refused("block_structure", ("[rows, columns]",))
    symmetric = weights.flag("symmetric", True)
    if not symmetric and form not in ("int-quantized", "pack-quantized"):
        raise weights.refused("symmetric", ("true",))
    return _with_activations(Scheme(form, bits, strategy, size, block, symmetric), group)


def _format(config: Fields, group: Fields, weights: Fields) -> str:
    holder = group if group.values.get("format") else config
    form = holder.choice("format", (*_FORMATS, _NAIVE))
    return f"{weights.choice('type', ('float', 'int'))}-quantized" if form == _NAIVE else form


def _with_activations(scheme: Scheme, group: Fields) -> Scheme:
    """Add activation rounding; unsupported kinds are ignored, as unrounded inputs are closer to the model."""
    inputs = group.optional("input_activations")
    if inputs is None:
        return scheme
    kind = _ACTIVATIONS.get((str(inputs.values.get("type")), scheme.format))
    if kind is None or inputs.values.get("num_bits") != 8 or not inputs.flag("symmetric", True):
        return scheme
    match inputs.values.get("strategy"), inputs.values.get("dynamic"):
        case "tensor", False | None:
            return dataclasses.replace(scheme, activations=kind, static=True)
        case "token", True:
            return dataclasses.replace(scheme, activations=kind)
        case "group", True:
            size = inputs.group_size("group_size")
            return dataclasses.replace(scheme, activations=kind, activation_group=size)
    return scheme


def _targets(group: Fields) -> tuple[str, ...]:
    match group.values.get("targets"):
        case [*targets] if all(isinstance(target, str) for target in targets):
            return tuple(targets)
    raise group.refused("targets", ("a list of names",))


def _refuse_unless_empty(config: Fields, name: str) -> None:
    values = config.values.get(name)
    if values and not (isinstance(values, Mapping) and values.get("format") == "dense"):
        raise config.refused(name, ("null",))


def _is_class(target: str, module: str) -> bool:
    """Return whether a target names the class of a module: "Linear" for all quantised modules except embeddings."""
    return target == ("Embedding" if module.endswith("embed_tokens") else "Linear")
