"""What the forms of calls have in common: functions, and the parts of structural tags that forms are made of."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxinfer.parsers.values import NAME

Node = dict[str, Any]
"""A format of a structural tag, as JSON has it."""

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
DEFINITIONS = ("$defs", "definitions")
_ABOUT = ANNOTATIONS | {"$schema", "$id", "$comment", "strict", *DEFINITIONS}
_PARTS = _ABOUT | {"type", "properties", "required", "additionalProperties"}


class FormError(ValueError):
    """A function that cannot be called in a form.

    Args:
        place: the part of a function that is wrong: ``name``, ``parameters``.
    """

    def __init__(self, function: Function, place: str, reason: str) -> None:
        super().__init__(f"{function.place}.{place} {reason}")
        self.place, self.reason = f"{function.place}.{place}", reason


@dataclasses.dataclass(frozen=True)
class Function:
    """What may be called.

    Attributes:
        place: in the request: ``tools[0].function``.
        schema: of its arguments.
    """

    place: str
    name: str
    schema: Mapping[str, Any]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Of the schema, by name, in order."""
        found = self.schema.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def open(self) -> bool:
        """Whether nothing is said of the parameters: there may be any."""
        return not self.parameters and self.schema.get("additionalProperties", True) in (True, {})

    @property
    def definitions(self) -> dict[str, Any]:
        """What the schemas of parameters may refer to."""
        return {word: self.schema[word] for word in DEFINITIONS if word in self.schema}

    def needs(self, parameter: str) -> bool:
        required = self.schema.get("required")
        return isinstance(required, list) and parameter in required


class Form(NamedTuple):
    """How a family writes calls.

    Attributes:
        calls: calls and nothing else, with space in front.
        text: free text, in which whatever begins like a call is one.
        beside: makes of another format: calls, or that.
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
    """JSON of a function's arguments."""
    return schema_of(function.schema, f"{function.place}.parameters")


SPACE = regex(r"[ \t\r\n]{0,8}")
"""Bounded, or a model could write it for ever."""


def several(call: Node, *, parallel: bool, between: Node = SPACE) -> Node:
    """A call, or with ``parallel`` any number of them."""
    return row(call, star(between, call)) if parallel else call


def marked(calls: Node, tags: Sequence[Node], triggers: Sequence[str], *, parallel: bool) -> Form:
    """A form of calls that begin with ``triggers``, in text as ``tags``."""
    text = {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), "stop_after_first": not parallel}
    return Form(row(SPACE, calls), text, lambda answer: row(SPACE, either([calls, answer])))


def unmarked(calls: Node, begin: str) -> Form:
    """A form of calls without a marker, which begin with a bracket or with a special token; all else is text."""
    others = row(regex(rf"[ \t\r\n]*(?:[^ \t\r\n<\{begin}]|<[^|])"), any_text())
    text = either([row(SPACE, calls), others, regex(r"[ \t\r\n]*<?")])
    return Form(row(SPACE, calls), text, lambda answer: row(SPACE, either([calls, answer])))


def check_names(functions: Iterable[Function], names: re.Pattern[str] = NAME) -> None:
    """Check that the form's parser reads the functions' names.

    Raises:
        FormError: it would not.
    """
    for function in functions:
        if not (NAME.fullmatch(function.name) and names.fullmatch(function.name)):
            raise FormError(
                function, f"name={function.name!r:.100}", "cannot be called in the form of this model's calls"
            )


def check_parts(function: Function) -> None:
    """Check that a schema tells of parameters one by one.

    Raises:
        FormError: it does not, naming the keyword.
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
