"""Field tables of request bodies: which fields are served, and how the remaining fields are treated.

There are three kinds of fields that are not served. Unserved fields would change the answer: they are rejected by name
unless their value requests nothing (null, or OpenAI's default). Fields without effect are accepted, and a response
header names them (`jaxinfer.serve.api.ignored`). Labels never change an answer. All other fields are mistakes and are
rejected with the nearest known name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import pydantic
from pydantic import ConfigDict

from jaxinfer.config.aliases import advice
from jaxinfer.serve.api.errors import Kind, ServeError, short
from jaxinfer.serve.api.ignored import ignore
from jaxinfer.serve.http.errors import from_pydantic

_DATED = re.compile(r"_([0-9]{8}|[0-9]{4}_[0-9]{2}_[0-9]{2})\Z")


class Body(pydantic.BaseModel):
    """A request body with exactly these fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Rejected fields, and the values of each that request nothing and are accepted."""
    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are accepted and ignored, and the values of each that the response header need not name."""
    labels: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change an answer."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Field names of other APIs, and the field to use here instead."""


def checked[B: Body](kind: type[B], fields: Mapping[str, Any], at: str = "") -> B:
    """Validate fields as a body of this kind.

    Args:
        at: path of the body within the request; "": it is the request itself.

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
    """Return whether an item of type ``kind`` (which may end with a date) is left out of the prompt, i.e. ``kinds``
    maps it to None; if so, note it as ignored."""
    name = kind if not isinstance(kind, str) or kind in kinds else undated(kind)
    return isinstance(name, str) and kinds.get(name, Body) is None and ignore(f"{path}.type={kind}")


def undated(kind: str) -> str:
    """Return the type without its version date."""
    return _DATED.sub("", kind)


def _is_passed_over(kind: type[Body], name: str, value: Any, place: str) -> bool:
    """Return whether a field is skipped; a field without effect is noted as ignored.

    Raises:
        ServeError: INVALID: the field is unknown, or unserved with a value that would change the answer.
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
    """Return the nested body classes by field name."""
    kinds = ((name, (field.annotation, *get_args(field.annotation))) for name, field in kind.model_fields.items())
    return {name: each for name, found in kinds for each in found if isinstance(each, type) and issubclass(each, Body)}
