"""A short ``repr`` for dataclasses."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any, ClassVar


class _Short(reprlib.Repr):
    """A ``Repr`` that cuts long values and shows repeated members of a tuple once."""

    def repr_list(self, x: Sequence[Any], level: int) -> str:
        shown = ", ".join(self.repr1(item, level - 1) for item in x[: self.maxlist])
        return f"[{shown}]" if len(x) <= self.maxlist else f"[{shown}, ... {len(x)} in all]"

    def repr_tuple(self, x: tuple[Any, ...], level: int) -> str:
        period = next((n for n in range(1, len(x) // 2 + 1) if x[n:] == x[:-n]), 0)
        if not period:
            return f"({self.repr_list(x, level)[1:-1]}{',' if len(x) == 1 else ''})"
        times, rest = divmod(len(x), period)
        shown = f"{times} * {self.repr_tuple(x[:period], level)}"
        return f"{shown} + {self.repr_tuple(x[:rest], level)}" if rest else shown


_SHORT = _Short()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8
_SHORT.maxstring, _SHORT.maxother = 240, 1000


class ShortRepr:
    """A dataclass mixin (``repr=False``) with a short ``repr``: only non-default fields, long values cut."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)
        values = {field.name: getattr(self, field.name) for field in fields if field.repr}
        defaults = {field.name: field.default for field in fields}
        shown = (f"{name}={_SHORT.repr(value)}" for name, value in values.items() if value != defaults[name])
        return f"{type(self).__name__}({', '.join(shown)})"
