"""Shared code of tool call forms: functions, and constructors of structural tag formats."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxinfer.parsers.values import NAME

Node = dict[str, Any]
"""A format of a structural tag, as JSON."""

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
DEFINITIONS = ("$defs", "definitions")
_ABOUT = ANNOTATIONS | {"$schema", "$id", "$comment", "strict", *DEFINITIONS}
_PARTS = _ABOUT | {"type", "properties", "required", "additionalProperties"}


class FormError(ValueError):
    """A function that cannot be called in a form.

    Args:
        place: the invalid field of the function: ``name``, ``parameters``.
    """

    def __init__(self, function: Function, place: str, reason: str) -> None:
        super().__init__(f"{function.place}.{place} {reason}")
        self.place, self.reason = f"{function.place}.{place}", reason


@dataclasses.dataclass(frozen=True)
class Function:
    """A callable function of the request.

    Attributes:
        place: path in the request: ``tools[0].function``.
        schema: JSON Schema of its arguments.
    """

    place: str
    name: str
    schema: Mapping[str, Any]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Schemas of the parameters by name, in order."""
        found = self.schema.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def open(self) -> bool:
        """Whether the schema does not constrain the parameters, so that any are allowed."""
        return not self.parameters and self.schema.get("additionalProperties", True) in (True, {})

    @property
    def definitions(self) -> dict[str, Any]:
        """Definitions that the schemas of parameters may refer to."""
        return {word: self.schema[word] for word in DEFINITIONS if word in self.schema}

    def needs(self, parameter: str) -> bool:
        required = self.schema.get("required")
        return isinstance(required, list) and parameter in required


class Form(NamedTuple):
    """Structural tag formats for the tool calls of a model family.

    Attributes:
        calls: calls only, with optional whitespace before them.
        text: free text in which everything that begins like a call is one.
        beside: makes, from a format, the choice between calls and that format.
    """

    calls: Node
    text: Node
    beside: Callable[[Node], Node]


def const(value: str) -> Node:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Node:
    return {"type": "regex", "pattern": pattern}


def any_text(*excludes: str) -> Node:
    return {"type": "any_text", "excludes": list(excludes)}


def row(*elements: Node) -> Node:
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Iterable[Node]) -> Node:
    return {"type": "or", "elements": list(elements)}


def optional(*content: Node) -> Node:
    return {"type": "optional", "content": row(*content)}


def star(*content: Node) -> Node:
    return {"type": "star", "content": row(*content)}


def tag(begin: str, content: Node, end: str) -> Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema_of(schema: Mapping[str, Any] | bool, place: str) -> Node:
    return {"type": "json_schema", "json_schema": schema, "name": place}


def arguments(function: Function) -> Node:
    """Return the format of a function's arguments as JSON."""
    return schema_of(function.schema, f"{function.place}.parameters")


SPACE = regex(r"[ \t\r\n]{0,8}")
"""Optional whitespace; bounded, because a model could generate it endlessly."""


def several(call: Node, *, parallel: bool, between: Node = SPACE) -> Node:
    """Return the format of one call or, with ``parallel``, of any number of calls."""
    return row(call, star(between, call)) if parallel else call


def marked(calls: Node, tags: Sequence[Node], triggers: Sequence[str], *, parallel: bool) -> Form:
    """Return a form of calls that begin with ``triggers``; in free text they are ``tags``."""
    text = {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), "stop_after_first": not parallel}
    return Form(row(SPACE, calls), text, lambda answer: row(SPACE, either([calls, answer])))


def unmarked(calls: Node, begin: str) -> Form:
    """Return a form of calls without a marker, which begin with a bracket or a special token; all else is text."""
    others = row(regex(rf"[ \t\r\n]*(?:[^ \t\r\n<\{begin}]|<[^|])"), any_text())
    text = either([row(SPACE, calls), others, regex(r"[ \t\r\n]*<?")])
    return Form(row(SPACE, calls), text, lambda answer: row(SPACE, either([calls, answer])))


def check_names(functions: Iterable[Function], names: re.Pattern[str] = NAME) -> None:
    """Check that the parser of the form accepts the names of the functions.

    Raises:
        FormError: it does not accept one.
    """
    for function in functions:
        if not (NAME.fullmatch(function.name) and names.fullmatch(function.name)):
            raise FormError(
                function, f"name={function.name!r:.100}", "cannot be called in the form of this model's calls"
            )


def check_parts(function: Function) -> None:
    """Check that a schema constrains parameters individually.

    Raises:
        FormError: it does not; names the keyword.
    """
    for word in function.schema:
        if word not in _PARTS:
            reason = f"cannot be held: {word} is about all arguments, and this model's calls write them one by one"
            raise FormError(function, "parameters", reason)
    required = function.schema.get("required")
    for name in required if isinstance(required, list) else ():
        if name not in function.parameters:
            raise FormError(function, "parameters", f"cannot be held: {name!r:.100} is required, but no property")
    if not function.parameters and not function.open and function.schema.get("additionalProperties") is not False:
        raise FormError(function, "parameters", "cannot be held: additionalProperties, where there are no properties")
