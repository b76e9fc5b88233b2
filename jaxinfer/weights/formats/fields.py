"""Untrusted fields of a quantisation config: each is checked as it is read, and errors name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from jaxinfer.formats import json_values
from jaxinfer.weights.errors import CheckpointError, quoted

CONFIG_FILE = "config.json"

_Known = TypeVar("_Known", str, int)
_LARGEST_GROUP = 1 << 20
_LARGEST_NUMBER = 1 << 20
_LONGEST_NAME = 64

# Alternative field names: of llm-awq (w_bit, q_group_size), GPTQ-for-LLaMa (wbits, groupsize), GPTQModel, which uses
# one format field for all methods, and the first releases of auto-round.
_SPELLINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bits": ("w_bit", "wbits"),
        "group_size": ("q_group_size", "groupsize"),
        "desc_act": ("act_order",),
        "checkpoint_format": ("format",),
        "version": ("format", "checkpoint_format"),
    }
)

_PACKINGS = ("checkpoint_format", "format", "version", "packing_format", "backend", "is_marlin_format")
_REPACK = (
    "Layouts of one kernel (Marlin, GEMV, llm-awq) are not read: take the model in a layout of those, or quantise the "
    "original again, as GPTQModel and llm-compressor do"
)


class Fields:
    """A JSON object from a file that describes how weights are stored. A null field counts as absent.

    Attributes:
        path: its name in messages, "quantization_config.weights" for example; empty: the whole file.
        file: name of the file.
    """

    def __init__(self, values: Mapping[str, Any], path: str, file: str = CONFIG_FILE) -> None:
        self.values = values
        self.path = path
        self.file = file

    def spelled(self, name: str) -> str:
        """Return the spelling of a field that the object uses.

        Raises:
            CheckpointError: it uses two, with different values.
        """
        found = [one for one in (name, *_SPELLINGS.get(name, ())) if self.values.get(one) is not None]
        if len({_comparable(self.values[one]) for one in found}) > 1:
            others = " and ".join(f"{one} is {self._shown(one)}" for one in found[1:])
            raise CheckpointError(f"{self._place(found[0])} is {self._shown(found[0])}, but {others}")
        return found[0] if found else name

    def get(self, name: str) -> Any:
        """Return the value of a field under any of its spellings; None if it is absent."""
        return self.values.get(self.spelled(name))

    def choice(self, name: str, known: Sequence[_Known], default: _Known | None = None) -> _Known:
        """Return a value out of ``known``, strings in any case; ``default`` if it is absent.

        Raises:
            CheckpointError: it is none of them, or absent without a default.
        """
        value = self.get(name)
        if value is None and default is not None:
            return default
        for one in known:
            same = json_values.whole(value) == one if isinstance(one, int) else _comparable(value) == one.lower()
            if same:
                return one
        raise self.refused(name, known)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean field; raise CheckpointError for any other value."""
        value = self.get(name)
        found = default if value is None else json_values.flag(value)
        if found is None:
            raise self.refused(name, ("true", "false"))
        return found

    def groups(self, default: int | None = None) -> int | None:
        """Return ``group_size`` as `group_size` reads it; ``default`` if it is absent."""
        return default if self.get("group_size") is None else self.group_size("group_size")

    def group_size(self, name: str, default: int | None = None) -> int:
        """Return the number of inputs that share a scale; 0 means all inputs, written as -1 in files."""
        value = self.get(name)
        size = default if value is None else json_values.whole(value)
        if size is None or not (size == -1 or 1 <= size <= _LARGEST_GROUP):
            raise self.refused(name, ("-1", f"1 to {_LARGEST_GROUP}"))
        return 0 if size == -1 else size

    def number(self, name: str, default: float) -> float:
        """Return a number that is neither negative nor too large; raise CheckpointError otherwise."""
        value = self.get(name)
        number = default if value is None else json_values.real(value)
        if number is None or not 0 <= number <= _LARGEST_NUMBER:
            raise self.refused(name, (f"0 to {_LARGEST_NUMBER}",))
        return number

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the rows and columns that share a scale, from [128, 128] or "128x128"; None if absent."""
        value = self.get(name)
        if value is None:
            return None
        parts = value.split("x") if isinstance(value, str) else value
        match [json_values.whole(part) for part in parts] if isinstance(parts, list) else None:
            case [int(rows), int(columns)] if min(rows, columns) >= 1 and max(rows, columns) <= _LARGEST_GROUP:
                return rows, columns
        raise self.refused(name, (f"[1 to {_LARGEST_GROUP}, 1 to {_LARGEST_GROUP}]",))

    def child(self, name: str) -> Fields:
        """Return a nested object; raise CheckpointError if the field is no object."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise self.refused(name, ("an object",))
        return Fields(value, self._within(name), self.file)

    def optional(self, name: str) -> Fields | None:
        """Return a nested object, or None if it is absent or empty."""
        return self.child(name) if self.values.get(name) else None

    def require_empty(self, *names: str) -> None:
        """Raise CheckpointError if one of the fields is set."""
        for name in names:
            if self.values.get(name):
                raise self.refused(name, ("null",))

    def refused(self, name: str, known: Sequence[object]) -> CheckpointError:
        """Return the error for an unknown value."""
        name = self.spelled(name)
        listed = ", ".join(str(one) for one in known)
        advice = f". {_REPACK}" if name in _PACKINGS else ""
        return CheckpointError(f"{self._place(name)} is {self._shown(name)}: known are {listed}{advice}")

    def _place(self, name: str) -> str:
        return f"{self._within(name)} of {self.file}"

    def _within(self, name: str) -> str:
        return f"{self.path}.{_printable(name)}".removeprefix(".")

    def _shown(self, name: str) -> str:
        value = self.values.get(name)
        return quoted(value) if isinstance(value, str) else "absent" if value is None else quoted(str(value))[1:-1]


def _printable(name: str) -> str:
    """Format a field name for a message; it can come from the file."""
    return name if name.isidentifier() and len(name) < _LONGEST_NAME else quoted(name)


def _comparable(value: object) -> object:
    """Return a normalised value for comparison: strings in lower case, numbers by value."""
    number = json_values.real(value)
    return number if number is not None else value.lower() if isinstance(value, str) else repr(value)
