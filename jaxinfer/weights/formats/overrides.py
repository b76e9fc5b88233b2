"""Per-module overrides in quantisation configs: ``dynamic`` of GPTQModel and ``extra_config`` of auto-round.

Overrides use the module names of the model that was quantised, tensors the names in the file. These differ for a text
model inside another model, so a module is looked up by each name that it may have (`formats.multimodal.names_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxinfer.formats.multimodal import names_of
from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.patterns import Patterns
from jaxinfer.weights.formats.tensors import RawTensors

_WITH, _WITHOUT = "+:", "-:"
_PLAIN_BITS = 16


class Overrides:
    """Overrides of the quantisation fields, by module.

    Raises:
        CheckpointError: the field is no object of objects.
    """

    def __init__(self, tensors: RawTensors, config: Fields) -> None:
        self._dynamic = _Rules(config, "dynamic")
        self._extra = _Rules(config, "extra_config")
        self._tensors = tensors

    def of(self, module: str) -> Fields | None:
        """Return the overrides of a module that is stored quantised; None if there are none.

        Raises:
            CheckpointError: the configuration declares it unquantized, or rejects one of its patterns.
        """
        names = names_of(module)
        found = self._dynamic.first(names, self._dynamic_fits) or self._extra.first(names, str.__eq__)
        found = found or self._extra.first(names, self._extra_fits)
        if found is None:
            return None
        rule, fields = found
        if rule.startswith(_WITHOUT) or fields.choice("bits", (_PLAIN_BITS, *range(1, 9)), 1) == _PLAIN_BITS:
            raise CheckpointError(
                f"{quoted(module)} is stored quantised, but {fields.path} of {fields.file} says that it is not"
            )
        require_integers(fields)
        return fields

    def _dynamic_fits(self, rule: str, name: str) -> bool:
        """Return whether a pattern matches at the start of a name; the first matching rule applies (GPTQModel 7.7)."""
        return self._dynamic.patterns.match(rule.removeprefix(_WITH).removeprefix(_WITHOUT), name)

    def _extra_fits(self, rule: str, name: str) -> bool:
        """Return whether a key that is no module's name matches anywhere as a pattern (auto-round 0.16)."""
        is_module = f"{rule}.qweight" in self._tensors or f"{rule}.weight" in self._tensors
        return not is_module and self._extra.patterns.search(rule, name)


def require_integers(fields: Fields) -> None:
    """Raise CheckpointError unless weights are integers in 32-bit words and inputs are unquantized."""
    fields.choice("data_type", ("int", "int_sym", "int_asym"), "int")
    fields.choice("act_bits", (16, 32), 16)
    fields.choice("pack_dtype", ("int32",), "int32")


class _Rules:
    """An object of objects in a configuration, keyed by module name or pattern."""

    def __init__(self, config: Fields, name: str) -> None:
        fields = config.optional(name)
        self._rules: Mapping[str, Fields] = MappingProxyType(
            {} if fields is None else {rule: fields.child(rule) for rule in fields.values}
        )
        self.patterns = Patterns(name)

    def first(self, names: tuple[str, ...], fits: Callable[[str, str], bool]) -> tuple[str, Fields] | None:
        """Return the first rule that fits one of a module's names."""
        return next(
            ((rule, fields) for rule, fields in self._rules.items() if any(fits(rule, name) for name in names)), None
        )
