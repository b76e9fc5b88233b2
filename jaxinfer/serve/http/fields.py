"""Fields of bodies: which are served, and what becomes of the others.

Fields that are not served are of three kinds. Without one the answer would be wrong: it is refused by name unless it
asks for nothing (null, or OpenAI's default). Without another the answer is as good: it is accepted, and a header of
the answer names it (`jaxinfer.serve.ignored`). Labels change no answer anywhere. All other fields are refused with the
nearest name that there is: they are mistakes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import pydantic
from pydantic import ConfigDict

from jaxinfer.names import advice
from jaxinfer.serve.errors import Kind, ServeError, short
from jaxinfer.serve.http.errors import from_pydantic
from jaxinfer.serve.ignored import ignore

_DATED = re.compile(r"_([0-9]{8}|[0-9]{4}_[0-9]{2}_[0-9]{2})\Z")


class Body(pydantic.BaseModel):
    """A body with these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are refused, and the values of them that ask for nothing."""
    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are accepted, and the values of them that need not be named in the answer's header."""
    labels: ClassVar[frozenset[str]] = frozenset()
    """Fields that change no answer."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Names that others have, and what to write here."""


def checked[B: Body](kind: type[B], fields: Mapping[str, Any], at: str = "") -> B:
    """A body of this kind.

    Args:
        at: where it is in the request; "": it is the request.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    known, place = dict[str, Any](), f"{at}." if at else ""
    for name, value in fields.items():
        if _is_passed_over(kind, name, value, place):
            continue
        part = _parts(kind).get(name)
        known[name] = checked(part, value, place + name) if part is not None and isinstance(value, dict) else value
    try:
        return kind.model_validate(known)
    except pydantic.ValidationError as error:
        raise from_pydantic(error, place) from error


def left_out(path: str, kind: Any, kinds: Mapping[str, type[Body] | None]) -> bool:
    """Whether something of the type ``kind``, which may end with a date, is left out of the prompt, which is noted:
    ``kinds`` has None for it."""
    name = kind if not isinstance(kind, str) or kind in kinds else undated(kind)
    return isinstance(name, str) and kinds.get(name, Body) is None and ignore(f"{path}.type={kind}")


def undated(kind: str) -> str:
    """The type without the date of its version."""
    return _DATED.sub("", kind)


def _is_passed_over(kind: type[Body], name: str, value: Any, place: str) -> bool:
    """Whether a field is not served; one without effect is noted.

    Raises:
        ServeError: INVALID: it is no field, or one without which the answer would be wrong.
    """
    if name in kind.model_fields:
        return False
    if name in kind.labels:
        return True
    harmless = kind.unserved.get(name, kind.without_effect.get(name))
    if harmless is None:
        raise _no_field(kind, name, place)
    asks = not any(value == other and type(value) is type(other) for other in harmless)
    if asks and (name in kind.unserved or not ignore(place + name)):
        raise ServeError(Kind.INVALID, f"{place}{name}={short(value)} is not served", field=place + name)
    return True


def _no_field(kind: type[Body], name: str, place: str) -> ServeError:
    meant = kind.renamed.get(name)
    near = advice(name, (*kind.model_fields, *kind.unserved, *kind.without_effect))
    hint = f"did you mean {meant}?" if meant is not None else near
    field = place + name[:100]
    return ServeError(Kind.INVALID, f"{field} is not a field of this request{': ' * bool(hint)}{hint}", field=field)


@functools.cache
def _parts(kind: type[Body]) -> Mapping[str, type[Body]]:
    """Bodies within a body, by their fields."""
    kinds = ((name, (field.annotation, *get_args(field.annotation))) for name, field in kind.model_fields.items())
    return {name: each for name, found in kinds for each in found if isinstance(each, type) and issubclass(each, Body)}
