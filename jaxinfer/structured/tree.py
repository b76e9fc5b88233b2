"""Syntax tree of structural tags: the xgrammar formats that can be enforced, with its names. No jax."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn


@dataclasses.dataclass(frozen=True)
class Const:
    """A text. Special tokens that it spells are these tokens."""

    value: str


@dataclasses.dataclass(frozen=True)
class Json:
    """JSON of a schema. ``place``: its name in errors."""

    schema: Mapping[str, Any] | bool
    place: str


@dataclasses.dataclass(frozen=True)
class AnyText:
    """Free text without any of ``excludes``."""

    excludes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Regex:
    """Text that matches a regular expression and contains none of ``excludes``."""

    pattern: str
    excludes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Grammar:
    """Text of a grammar in Lark or GBNF."""

    text: str


@dataclasses.dataclass(frozen=True)
class Row:
    """Concatenation of nodes."""

    elements: Sequence[Node]


@dataclasses.dataclass(frozen=True)
class Either:
    """Alternatives."""

    elements: Sequence[Node]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Repetition of a node, ``least`` to ``most`` times. ``most`` None: unbounded."""

    content: Node
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True)
class Tag:
    """Content between a text and one of ``ends``; empty: no text follows."""

    begin: str
    content: Node
    ends: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Triggered:
    """Free text with tags in it: each trigger in the text begins a tag that starts with it.

    Attributes:
        at_least_one: it begins with a tag.
        stop_after_first: nothing follows a tag.
    """

    triggers: Sequence[str]
    tags: Sequence[Tag]
    excludes: Sequence[str]
    at_least_one: bool
    stop_after_first: bool


Node = Const | Json | AnyText | Regex | Grammar | Row | Either | Repeat | Tag | Triggered
_PLACE = "structured_outputs.structural_tag"
_NAMED = {"optional": (0, 1), "plus": (1, None), "star": (0, None)}


def read(text: str) -> Node:
    """Parse a structural tag, in the format with ``format`` or the older one with ``structures`` and ``triggers``.

    Raises:
        ValueError: it is invalid; names the field.
    """
    found = json.loads(text)
    if not isinstance(found, Mapping):
        raise ValueError("a structural tag is an object")
    if "structures" in found:
        return _older(found)
    if found.get("type") != "structural_tag":
        _refuse("type", found.get("type"), "must be structural_tag")
    _check_fields(found, "", ("type", "format"))
    return _node(found.get("format"), "format")


def unlimited(node: Node) -> bool:
    """Return whether only the text after the node determines its end."""
    match node:
        case AnyText():
            return True
        case Triggered():
            return not (node.at_least_one and node.stop_after_first)
        case Tag(content=content, ends=()) | Repeat(content=content):
            return unlimited(content)
        case Row():
            return unlimited(node.elements[-1])
        case Either():
            return any(map(unlimited, node.elements))
    return False


def _older(found: Mapping[str, Any]) -> Triggered:
    _check_fields(found, "", ("type", "structures", "triggers", "at_least_one"))
    if found.get("type", "structural_tag") != "structural_tag":
        _refuse("type", found["type"], "must be structural_tag")
    tags = []
    for path, each in _listed(found, "", "structures"):
        _check_fields(each, path, ("begin", "schema", "end"))
        inner = Json(_schema(each, path, "schema"), f"{_PLACE}.{path}.schema")
        tags.append(_limited(Tag(_text(each, path, "begin"), inner, _ends(each, path)), path))
    return _triggered_of(found, "", tags)


def _node(found: Any, path: str) -> Any:
    kind = found.get("type") if isinstance(found, Mapping) else None
    if not isinstance(kind, str) or kind not in _READ:
        _refuse(f"{path}.type", kind, f"is not served: the formats are {', '.join(_READ)}")
    fields, make = _READ[kind]
    _check_fields(found, path, ("type", *fields))
    return make(found, path)


def _const(found: Mapping[str, Any], path: str) -> Const:
    return Const(_text(found, path, "value"))


def _json(found: Mapping[str, Any], path: str) -> Json:
    if found.get("style", "json") != "json":
        _refuse(f"{path}.style", found["style"], "is not served: it is json")
    place = _text(found, path, "name") if "name" in found else f"{_PLACE}.{path}.json_schema"
    return Json(_schema(found, path, "json_schema"), place)


def _any_text(found: Mapping[str, Any], path: str) -> AnyText:
    return AnyText(_texts(found, path, "excludes"))


def _regex(found: Mapping[str, Any], path: str) -> Regex:
    return Regex(_text(found, path, "pattern"), _texts(found, path, "excludes"))


def _grammar(found: Mapping[str, Any], path: str) -> Grammar:
    return Grammar(_text(found, path, "grammar"))


def _row(found: Mapping[str, Any], path: str) -> Row:
    parts = _nodes(found, path, "elements")
    return Row([*(_limited(part, at) for at, part in parts[:-1]), parts[-1][1]])


def _either(found: Mapping[str, Any], path: str) -> Either:
    return Either([part for _, part in _nodes(found, path, "elements")])


def _times(found: Mapping[str, Any], path: str) -> Repeat:
    least, most = _NAMED[found["type"]] if found["type"] in _NAMED else _bounds(found, path)
    content = _node(found.get("content"), f"{path}.content")
    return Repeat(content if most == 1 else _limited(content, f"{path}.content"), least, most)


def _bounds(found: Mapping[str, Any], path: str) -> tuple[int, int | None]:
    for name in ("min", "max"):
        if type(found.get(name)) is not int:
            _refuse(f"{path}.{name}", found.get(name), "must be an integer")
    if found["min"] < 0:
        _refuse(f"{path}.min", found["min"], "must be at least 0")
    if found["max"] != -1 and found["max"] < max(found["min"], 1):
        _refuse(f"{path}.max", found["max"], "must be -1, or at least 1 and min")
    return found["min"], None if found["max"] == -1 else found["max"]


def _tag(found: Mapping[str, Any], path: str) -> Tag:
    content = _node(found.get("content"), f"{path}.content")
    return Tag(_text(found, path, "begin"), content, _ends(found, path))


def _triggered(found: Mapping[str, Any], path: str) -> Triggered:
    return _triggered_of(found, f"{path}.", _tags(found, path))


def _triggered_of(found: Mapping[str, Any], before: str, tags: Sequence[Tag]) -> Triggered:
    """Check triggers and build the node. ``tags``: each must begin with exactly one of the triggers."""
    path = before[:-1]
    triggers = _texts(found, path, "triggers")
    if not triggers or not all(triggers):
        _refuse(f"{before}triggers", found.get("triggers"), "must be texts that are not empty")
    for tag in tags:
        if sum(tag.begin.startswith(trigger) for trigger in triggers) != 1:
            _refuse(f"{before}triggers", triggers, f"must hold one that begins the tag {reprlib.repr(tag.begin)}")
    excludes = _texts(found, path, "excludes")
    return Triggered(triggers, tags, excludes, _flag(found, path, "at_least_one"), _flag(found, path, STOP))


def _separated(found: Mapping[str, Any], path: str) -> Node:
    """Expand tags with a separator to equivalent nodes."""
    one = Either(_tags(found, path))
    least = _flag(found, path, "at_least_one")
    if _flag(found, path, STOP):
        return one if least else Repeat(one, 0, 1)
    some = Row([one, Repeat(Row([Const(_text(found, path, "separator")), one]), 0, None)])
    return some if least else Repeat(some, 0, 1)


STOP = "stop_after_first"
_Read = tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], Node]]
_READ: Mapping[str, _Read] = {
    "const_string": (("value",), _const),
    "json_schema": (("json_schema", "style", "name"), _json),
    "any_text": (("excludes",), _any_text),
    "regex": (("pattern", "excludes"), _regex),
    "grammar": (("grammar",), _grammar),
    "sequence": (("elements",), _row),
    "or": (("elements",), _either),
    "tag": (("begin", "content", "end"), _tag),
    "triggered_tags": (("triggers", "tags", "at_least_one", STOP, "excludes"), _triggered),
    "tags_with_separator": (("tags", "separator", "at_least_one", STOP), _separated),
    "optional": (("content",), _times),
    "plus": (("content",), _times),
    "star": (("content",), _times),
    "repeat": (("content", "min", "max"), _times),
}


def _tags(found: Mapping[str, Any], path: str) -> list[Tag]:
    tags = []
    for at, each in _listed(found, f"{path}.", "tags"):
        _check_fields(each, at, ("type", "begin", "content", "end"))
        if each.get("type", "tag") != "tag":
            _refuse(f"{at}.type", each["type"], "must be tag")
        tags.append(_limited(_tag(each, at), at))
    return tags


def _nodes(found: Mapping[str, Any], path: str, name: str) -> list[tuple[str, Any]]:
    return [(at, _node(each, at)) for at, each in _listed(found, f"{path}.", name)]


def _listed(found: Mapping[str, Any], before: str, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the objects of a non-empty list, each with its path."""
    listed = found.get(name)
    if not isinstance(listed, list) or not listed:
        _refuse(f"{before}{name}", listed, "must be a list that is not empty")
    for place, each in enumerate(listed):
        if not isinstance(each, Mapping):
            _refuse(f"{before}{name}[{place}]", each, "must be an object")
    return [(f"{before}{name}[{place}]", each) for place, each in enumerate(listed)]


def _limited[N: Node](node: N, path: str) -> N:
    if unlimited(node):
        raise ValueError(f"{path} must end by itself: free text may be the last part alone, or end in a tag's end")
    return node


def _check_fields(found: Mapping[str, Any], path: str, names: Sequence[str]) -> None:
    for name in found:
        if name not in names:
            _refuse(f"{path}.{name:.50}".lstrip("."), found[name], f"is not served: the fields are {', '.join(names)}")


def _text(found: Mapping[str, Any], path: str, name: str) -> str:
    if not isinstance(found.get(name), str):
        _refuse(f"{path}.{name}".lstrip("."), found.get(name), "must be a string")
    return str(found[name])


def _texts(found: Mapping[str, Any], path: str, name: str) -> list[str]:
    listed = found.get(name, [])
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        _refuse(f"{path}.{name}".lstrip("."), listed, "must be a list of strings")
    return listed


def _ends(found: Mapping[str, Any], path: str) -> list[str]:
    """Return the end texts of a tag; an empty one is allowed only alone."""
    ends = _texts(found, path, "end") if isinstance(found.get("end"), list) else [_text(found, path, "end")]
    if len(ends) > 1 and not all(ends):
        _refuse(f"{path}.end", ends, "must hold no empty string")
    return [end for end in ends if end]


def _schema(found: Mapping[str, Any], path: str, name: str) -> Mapping[str, Any] | bool:
    schema = found.get(name)
    if not isinstance(schema, bool | Mapping):
        _refuse(f"{path}.{name}", schema, "must be a JSON Schema")
    return schema


def _flag(found: Mapping[str, Any], path: str, name: str) -> bool:
    if not isinstance(found.get(name, False), bool):
        _refuse(f"{path}.{name}".lstrip("."), found[name], "must be true or false")
    return bool(found.get(name, False))


def _refuse(place: str, value: Any, reason: str) -> NoReturn:
    raise ValueError(f"{place}={reprlib.repr(value)} {reason}")
