"""Fields of config.json that nobody vouches for: each is checked as it is read, and refused with its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jaxinfer.weights.errors import CheckpointError, quoted

_Known = TypeVar("_Known", str, int)
_LARGEST_GROUP = 1 << 20
_LARGEST_NUMBER = 1 << 20
_LONGEST_NAME = 64


class Fields:
    """A JSON object out of config.json.

    Attributes:
        path: what messages call it, "quantization_config.weights" for example.
    """

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def choice(self, name: str, known: Sequence[_Known], default: _Known | None = None) -> _Known:
        """A value out of ``known``; ``default`` where it is absent or null.

        Raises:
            CheckpointError: it is another one, or absent without a default.
        """
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        for one in known:
            if type(value) is type(one) and value == one:
                return one
        raise self.refused(name, known)

    def flag(self, name: str, default: bool) -> bool:
        """Boolean of a field; anything else raises CheckpointError."""
        value = self.values.get(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refused(name, ("true", "false"))
        return value

    def group_size(self, name: str, default: int | None = None) -> int:
        """Number of inputs that share a scale; 0 for all of them, which files write as -1."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not (value == -1 or 1 <= value <= _LARGEST_GROUP):
            raise self.refused(name, ("-1", f"1 to {_LARGEST_GROUP}"))
        return 0 if value == -1 else value

    def number(self, name: str, default: float) -> float:
        """A number that is neither negative nor too large; anything else raises CheckpointError."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 <= value <= _LARGEST_NUMBER:
            raise self.refused(name, (f"0 to {_LARGEST_NUMBER}",))
        return float(value)

    def block(self, name: str) -> tuple[int, int] | None:
        """Rows and columns that share a scale, from [128, 128] or "128x128"; None where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        parts = value.split("x") if isinstance(value, str) else value
        match parts:
            case [rows, columns] if _is_extent(rows) and _is_extent(columns):
                return int(rows), int(columns)
        raise self.refused(name, (f"[1 to {_LARGEST_GROUP}, 1 to {_LARGEST_GROUP}]",))

    def child(self, name: str) -> Fields:
        """An object within; raises CheckpointError where it is none."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise self.refused(name, ("an object",))
        return Fields(value, f"{self.path}.{_printable(name)}")

    def optional(self, name: str) -> Fields | None:
        """An object within, or None where it is absent, null or empty."""
        return self.child(name) if self.values.get(name) else None

    def refused(self, name: str, known: Sequence[object]) -> CheckpointError:
        """The error for a value that is not known."""
        value = self.values.get(name)
        found = quoted(value) if isinstance(value, str) else "absent" if value is None else quoted(str(value))[1:-1]
        listed = ", ".join(str(one) for one in known)
        return CheckpointError(f"{self.path}.{_printable(name)} of config.json is {found}: known are {listed}")


def _printable(name: str) -> str:
    """A field's name, which can be the file's own."""
    return name if name.isidentifier() and len(name) < _LONGEST_NAME else quoted(name)


def _is_extent(value: object) -> bool:
    if isinstance(value, str):
        return value.isascii() and value.isdigit() and len(value) < 8 and 1 <= int(value) <= _LARGEST_GROUP
    return type(value) is int and 1 <= value <= _LARGEST_GROUP
