"""What a configuration says of single modules, over what it says of all: GPTQModel's ``dynamic``, auto-round's
``extra_config``.

Modules are called what they are called in the model that was quantised, tensors what the file calls them. Around a text
model within another these differ, so a module is looked up by each name that it may have (`jaxinfer.wrapped.names_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.patterns import Patterns
from jaxinfer.weights.formats.tensors import RawTensors
from jaxinfer.wrapped import names_of

_WITH, _WITHOUT = "+:", "-:"
_PLAIN_BITS = 16


class Overrides:
    """The fields of modules that differ.

    Raises:
        CheckpointError: the field is no object of objects.
    """

    def __init__(self, tensors: RawTensors, config: Fields) -> None:
        self._dynamic = _Rules(config, "dynamic")
        self._extra = _Rules(config, "extra_config")
        self._tensors = tensors

    def of(self, module: str) -> Fields | None:
        """The fields of a module that is stored quantised; None where nothing is said of it.

        Raises:
            CheckpointError: the configuration says that it is not quantised, or one of its patterns is refused.
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
        """The first pattern counts that matches at the beginning of a name (GPTQModel 7.7)."""
        return self._dynamic.patterns.match(rule.removeprefix(_WITH).removeprefix(_WITHOUT), name)

    def _extra_fits(self, rule: str, name: str) -> bool:
        """A key that is no module's name is a pattern, which matches anywhere (auto-round 0.16)."""
        is_module = f"{rule}.qweight" in self._tensors or f"{rule}.weight" in self._tensors
        return not is_module and self._extra.patterns.search(rule, name)


def require_integers(fields: Fields) -> None:
    """Sees that weights are integers in words of 32 bits, and inputs as they come; else raises CheckpointError."""
    fields.choice("data_type", ("int", "int_sym", "int_asym"), "int")
    fields.choice("act_bits", (16, 32), 16)
    fields.choice("pack_dtype", ("int32",), "int32")


class _Rules:
    """An object of objects in a configuration, each by the modules that it is about."""

    def __init__(self, config: Fields, name: str) -> None:
        fields = config.optional(name)
        self._rules: Mapping[str, Fields] = MappingProxyType(
            {} if fields is None else {rule: fields.child(rule) for rule in fields.values}
        )
        self.patterns = Patterns(name)

    def first(self, names: tuple[str, ...], fits: Callable[[str, str], bool]) -> tuple[str, Fields] | None:
        """The first rule that fits one of a module's names."""
        return next(
            ((rule, fields) for rule, fields in self._rules.items() if any(fits(rule, name) for name in names)), None
        )
